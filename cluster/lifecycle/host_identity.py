"""Compares host keys with a second source: the head's with its console, the workers' with the head's view.

The event log records how each machine's key was verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from botocore.exceptions import BotoCoreError, ClientError

from cluster.context import Context
from cluster.local_files import EventLog
from cluster.nodes import Node
from infra.aws.clients import DENIED, error_code
from infra.errors import DeadlineError
from infra.wait import wait_until
from provision.host import Host
from provision.host_keys import (
    check_pinned_keys,
    parse_console_host_keys,
    pinned_host_keys,
    scan_host_keys,
)

CONSOLE, HEAD_VIEW, FIRST_CONTACT = "console", "head", "first contact"
_EVENT = "host key"
_NO_LATEST = ("Unsupported", "InvalidParameter")
# EC2 posts the console some time after a boot, at the latest after about 20 minutes:
# https://github.com/canonical/pycloudlib/pull/193
_CONSOLE_DEADLINE_S = 90.0


def verified_by(events: EventLog) -> dict[str, str]:
    """Return how this machine verified host keys, by instance ID."""
    found: dict[str, str] = {}
    for event in events.read():
        for id_ in event["resources"] if event["event"] == _EVENT else ():
            found[id_] = event["what"]
    return found


def _remember(ctx: Context, how: str, ids: Iterable[str]) -> None:
    known = verified_by(ctx.events)
    # If the console has since been overwritten, an earlier comparison still counts.
    if new := [i for i in ids if i not in known or how not in (known[i], FIRST_CONTACT)]:
        ctx.events.record(_EVENT, how, resources=new)


def check_head_identity(ctx: Context, head: Node) -> str:
    """Compare the head's pinned key with its console output; return a progress note.

    The console output comes through EC2's API, so an attacker on the network path can't change it.
    """
    id_ = head.instance.id
    known: tuple[str, ...] = ()
    why = "the console does not show it"
    pinned = pinned_host_keys(ctx.files.known_hosts, id_)
    try:
        known = _read_console_keys(ctx, id_, pinned)
    except ClientError:
        why = "no permission for GetConsoleOutput"
    if not known:
        _remember(ctx, FIRST_CONTACT, [id_])
        return (
            f"its host key was accepted on first contact: {why}; "
            f"`spr-cluster verify {ctx.flags}` looks again"
        )
    check_pinned_keys(head.name, id_, pinned, known, ctx.files.known_hosts)
    _remember(ctx, CONSOLE, [id_])
    return "its host key matches its console"


def _read_console_keys(ctx: Context, instance_id: str, pinned: Sequence[str]) -> tuple[str, ...]:
    """Return the host keys in the console output. Raises a ClientError only for a denial."""
    ec2 = ctx.clients.ec2
    try:
        answer = ec2.get_console_output(InstanceId=instance_id, Latest=True)
        return parse_console_host_keys(answer.get("Output", ""), pinned)  # botocore has decoded it
    except BotoCoreError:
        return ()
    except ClientError as error:
        # Not every type can show its latest output:
        # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetConsoleOutput.html
        if error_code(error) in DENIED:
            raise
        if not error_code(error).startswith(_NO_LATEST):
            return ()

    def posted() -> tuple[str, ...] | None:
        answer = ec2.get_console_output(InstanceId=instance_id)
        return parse_console_host_keys(answer.get("Output", ""), pinned) or None

    # Wait once per machine.
    limit = 0.0 if instance_id in verified_by(ctx.events) else _CONSOLE_DEADLINE_S
    try:
        return wait_until("console", posted, deadline_s=limit, clock=ctx.clock, every_s=15)
    except (DeadlineError, ClientError, BotoCoreError):
        return ()


def check_neighbors(ctx: Context, head: Host, nodes: Sequence[Node]) -> None:
    """Compare the pinned keys with those that the head sees in the private network.

    Raises :class:`HostKeyError` naming a node with another key there.
    """
    seen: Mapping[str, str] = scan_host_keys(head, [node.private_ip for node in nodes])
    for node in nodes:
        if key := seen.get(node.private_ip):
            pinned = pinned_host_keys(ctx.files.known_hosts, node.instance.id)
            check_pinned_keys(node.name, node.instance.id, pinned, (key,), ctx.files.known_hosts)
    for how, there in ((HEAD_VIEW, True), (FIRST_CONTACT, False)):
        ids = [node.instance.id for node in nodes if (node.private_ip in seen) == there]
        _remember(ctx, how, ids)
