"""Repairs a cluster's SSH rule after this machine's address has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from cluster.local_files import EventLog
from infra.aws.clients import Clients
from infra.aws.cloud import Cloud
from infra.ec2.inventory import find_group
from infra.ec2.network import SecurityGroup, open_security_group
from infra.errors import NoAnswerError, SprError
from infra.wait import Clock, Progress
from provision.host import Host, Result, Stream, TextSink

T = TypeVar("T")

# While machines boot, hundreds of connections fail in a row; look up the address once a minute.
_AGAIN_S = 60.0
_UNKNOWN = (SprError, ClientError, BotoCoreError)


@dataclass(frozen=True)
class Move:
    """This machine's address, ``caller``, is not one that the security group admits to SSH."""

    group: SecurityGroup
    caller: str

    def __str__(self) -> str:
        group = self.group
        if group.followed:
            old = ", ".join(sorted(group.followed))
            return f"this machine's address changed from {old} to {self.caller}"
        return (
            f"SSH is open to {', '.join(group.ssh_cidrs)}; this machine's address is {self.caller}"
        )


class AccessContext(Protocol):
    """The part of :class:`cluster.context.Context` that :class:`Access` uses."""

    @property
    def name(self) -> str: ...
    @property
    def cloud(self) -> Cloud: ...
    @property
    def clients(self) -> Clients: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def events(self) -> EventLog: ...
    @property
    def allow(self) -> Callable[[str], bool]: ...
    @property
    def flags(self) -> str: ...


class Access:
    """Checks whether the cluster admits this machine to SSH. Threads share one lookup per minute."""

    def __init__(self, ctx: AccessContext) -> None:
        self.ctx = ctx
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._repaired = False
        self.refused: Move | None = None
        """A change of address that the user did not allow."""
        self.moved_to = ""
        """This machine's address, if the rule was repaired for it."""

    def find_move(self) -> Move | None:
        """Compare the rule with this machine's address; ``None`` if it fits or either is unknown."""
        ctx = self.ctx
        try:
            found = find_group(ctx.clients.ec2, ctx.name)
            group, record = found.group, found.record
            if group is None or not group.ssh_cidrs:
                return None
            # From inside the VPC, SSH does not come from the address that the internet sees.
            if record and (record.options["private"] or record.options["jump"]):
                return None
            caller = ctx.cloud.caller_cidr()
        except _UNKNOWN:
            return None
        return None if group.admits(caller) else Move(group, caller)

    def repair_rule(self) -> bool:
        """Open SSH to this machine's new address, if the user allows it; return whether to try again."""
        clock = self.ctx.clock
        with self._lock:
            if clock.monotonic() - self._looked_at < _AGAIN_S:
                return self._repaired
            move = self.find_move()
            # The user may take time to answer, so the minute begins afterward.
            self._repaired = move is not None and self._try_to_follow(move)
            self.refused = None if self._repaired else move
            self._looked_at = clock.monotonic()
            return self._repaired

    def _try_to_follow(self, move: Move) -> bool:
        if not self.ctx.allow(f"{move}; allow it?"):
            return False
        try:
            self.follow(move)
        except _UNKNOWN as error:
            self.ctx.progress.note(f"{move}; SSH can't be opened to it: {error}")
            return False
        return True

    def follow(self, move: Move) -> None:
        """Open SSH to the new address; close it to the old one, unless the user chose that."""
        cidrs = move.group.cidrs_for(move.caller)
        open_security_group(self.ctx.clients.ec2, move.group, cidrs, move.caller)
        self.moved_to = move.caller
        self.ctx.progress.note(f"{move}; SSH is open to it now")
        self.ctx.events.record("address", str(move), resources=[move.group.id])


@dataclass(frozen=True)
class FollowedHost:
    """A :class:`provision.host.Host` that tries again after the SSH rule is repaired."""

    host: Host
    access: Access

    @property
    def name(self) -> str:
        return self.host.name

    def _try(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except NoAnswerError as error:
            if self.access.repair_rule():
                return work()
            if not (move := self.access.refused):
                raise
            hint = f"to allow it: spr-cluster up {self.access.ctx.flags}"
            text = error.message.removeprefix(f"[{self.name}] ")
            raise NoAnswerError(self.name, f"{text}; {move}", hint=hint) from None

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_text: TextSink | None = None,
    ) -> Result:
        host = self.host
        return self._try(
            lambda: host.run(command, timeout_s=timeout_s, check=check, on_text=on_text)
        )

    def open_stream(self, command: str) -> Stream:
        return self._try(lambda: self.host.open_stream(command))

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        self._try(lambda: self.host.put(content, path, mode))

    def upload(self, source: Path, path: str) -> None:
        self._try(lambda: self.host.upload(source, path))

    def download(self, command: str) -> Iterator[bytes]:
        return self._try(lambda: self.host.download(command))

    def close(self) -> None:
        self.host.close()

    def why_gone(self) -> str:
        return self.host.why_gone()
