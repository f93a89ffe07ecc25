"""Event log of a cluster: each plan, action, reason, and resource as one JSON line.

The log stays on this machine when the cluster is removed. It holds no secrets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from infra.aws.api_time import API_TIME
from infra.ec2.tags import render_time
from infra.errors import UsageError
from infra.files import parse_object, read_text
from infra.plan.actions import Action

# Messages of failed commands are quoted as reasons, and a command's output may contain anything.
_SECRETS = (
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL),
    re.compile(r"(://)[^/\s@]+(?=@)"),
    re.compile(r"(?i)((?:password|secret|token)\w*\W{0,3}[=:]\W{0,3})[\w/+.=-]{8,}"),
)


def utc_now() -> datetime:
    """Return the time in UTC, by the cloud's clock if this machine's is wrong."""
    return API_TIME.now()


@dataclass(frozen=True)
class EventLog:
    """The log of one cluster, and the command that writes to it."""

    path: Path
    command: str = ""
    now: Callable[[], datetime] = utc_now

    def record(
        self, event: str, what: str, *, reason: str = "", resources: Sequence[str] = (), **more: Any
    ) -> None:
        """Append one event. A log that can't be written stops no command."""
        line = {
            "time": render_time(self.now()),
            "command": self.command,
            "version": _version(),
            "event": event,
            "what": what,
            "reason": reason,
            "resources": list(resources),
            **more,
        }
        text = json.dumps(_without_secrets(line), ensure_ascii=False)
        content = text.encode(errors="backslashreplace")  # invalid text becomes JSON's escapes
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                file.write(_end_of_torn_line(descriptor) + content + b"\n")

    def record_action(self, event: str, action: Action, reason: str = "") -> None:
        """Append what happened to a plan's action."""
        kind = action.kind.name.lower()
        self.record(event, action.title, reason=reason, resources=action.ids, action=kind)

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def read(self) -> list[dict[str, Any]]:
        """Return the events, oldest first; lines that are damaged are skipped."""
        lines = read_text(self.path, "", errors="replace").split("\n")
        return [event for line in lines if (event := _parse(line)) is not None]


def describe_failure(error: BaseException) -> str:
    """Return an exception as a reason."""
    return str(getattr(error, "message", "") or error) or type(error).__name__


def _end_of_torn_line(descriptor: int) -> bytes:
    """Return a line break if a crash left the last line without one."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = parse_object(line, "event")
    except UsageError:
        return None
    resources = event.get("resources", [])
    texts = [*map(event.get, ("time", "event", "what"))]
    texts += resources if isinstance(resources, list) else [None]
    return event if all(isinstance(text, str) for text in texts) else None


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        for pattern in _SECRETS:
            value = pattern.sub(r"\1***", value)
    return value


@cache
def _version() -> str:
    try:
        return version("spr-cluster")
    except PackageNotFoundError:
        return "unknown"
