"""A question to a cluster's head within a few seconds; that it does not answer is an answer, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from cluster.context import Context
from cluster.nodes import rank_nodes
from infra.ec2 import tags
from infra.ec2.instances import HEAD
from infra.ec2.inventory import Inventory
from infra.errors import SprError
from provision.host import Host

T = TypeVar("T")


@dataclass(frozen=True)
class NoAnswer:
    """``why`` the head did not answer; "" if there is none on which jobs could ever run."""

    why: str = ""


def ask_head(
    ctx: Context, found: Inventory, ask: Callable[[Host], T], limit_s: float
) -> T | NoAnswer:
    """Return what the head says. Takes at most about ``limit_s`` seconds, and never fails."""
    heads = [node for node in rank_nodes(found.alive) if node.instance.role == HEAD]
    # Jobs run only on a cluster that was connected.
    if not heads or tags.MESH not in heads[0].instance.tags:
        return NoAnswer()
    if heads[0].instance.state != "running":
        return NoAnswer(f"it is {heads[0].instance.state}")
    try:
        jump = found.record.options["jump"] if found.record else None
    except SprError as error:
        return NoAnswer(error.message)
    head = replace(heads[0], jump=jump or "")
    # A question about this machine's address could not be answered in time.
    quiet = replace(ctx, allow=lambda _: False)
    answers: list[T | NoAnswer] = []

    def connect_and_ask() -> None:
        try:
            answers.append(ask(quiet.host_opener()(head)))
        except SprError as error:
            answers.append(NoAnswer(error.message))

    # Connecting alone may take longer than that. A daemon does not delay this process's end.
    thread = threading.Thread(target=connect_and_ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else NoAnswer(f"no answer within {limit_s:g} s")
