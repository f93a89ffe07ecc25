"""Files kept on this machine for a cluster: key, host keys, SSH configuration, and event log.

The event log records plans, actions, reasons, and resources, one JSON object per line, without secrets.
It survives the cluster's removal.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra.aws.api_time import API_TIME
from infra.ec2.tags import parse_time, render_time
from infra.errors import UsageError
from infra.files import parse_object, read_text, write_private
from infra.plan.actions import Action
from infra.spec import CLUSTER_NAME, CLUSTER_NAME_RULE
from infra.version import read_version
from infra.words import nearest
from provision.host import SSH_USER, Login

_CLOUD_LINE = "# spr-cluster lives in:"
_ACCOUNT_LINE = "# spr-cluster account:"


def home() -> Path:
    """``$SPR_CLUSTER_HOME``, else ``~/.spr-cluster``."""
    place = os.environ.get("SPR_CLUSTER_HOME") or "~/.spr-cluster"
    # Absolute, because the ssh configuration has these paths, and ssh may run in any folder.
    # `Path.expanduser` raises for an unknown ~name.
    return Path(os.path.expanduser(place)).absolute()  # noqa: PTH111


def machine_id() -> str:
    """Return a random ID of this machine, drawn when it is first needed, or its name if none can be kept."""
    path = home() / ".machine-id"
    with suppress(OSError, UsageError):
        if not read_text(path, ""):
            write_private(path, secrets.token_hex(8))
        return read_text(path)
    return socket.gethostname()


@dataclass(frozen=True)
class ClusterFiles:
    """A cluster's folder. Losing it loses no machine: ``down`` works from tags alone."""

    folder: Path

    @staticmethod
    def of(cluster: str) -> ClusterFiles:
        """Raises :class:`UsageError` for a name that could lead out of the home folder."""
        if not re.fullmatch(CLUSTER_NAME, cluster):
            raise UsageError(f"--name {cluster}: expected {CLUSTER_NAME_RULE}")
        return ClusterFiles(home() / cluster)

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def ssh_hosts(self) -> Path:
        """The nodes as ``NAME-node0``, for the user's own SSH configuration."""
        return self.folder / "ssh_hosts"

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def removal(self) -> Path:
        """Exists while `down` is removing the cluster; contains its cloud, region, and account."""
        return self.folder / "removal"

    @property
    def exist(self) -> bool:
        """Whether this machine has any of the cluster's files, apart from the event log."""
        return any(path.exists() for path in (self.key, self.known_hosts, self.ssh_config))

    @property
    def login(self) -> Login:
        return Login(self.key, self.known_hosts, SSH_USER)

    def remember(
        self,
        cloud: str,
        region: str,
        ssh_config: str = "",
        *,
        folder: str = "",
        account: str = "",
        profile: str = "",
    ) -> None:
        """Record the cluster's cloud, region, and account in the first lines of its SSH configuration.

        ``folder`` is the embedded cloud's; ``profile`` is the AWS profile in use.
        """
        if ssh_config or not self.ssh_config.exists():
            first = f"{_CLOUD_LINE} {cloud} {region} {folder}".rstrip()
            second = f"{_ACCOUNT_LINE} {account} {' '.join(profile.split())}".rstrip()
            head = f"{first}\n{second}\n" if account else f"{first}\n"
            write_private(self.ssh_config, head + ssh_config)

    @contextmanager
    def lock(self, command: str = "") -> Iterator[None]:
        """Let only one command at a time change a cluster; the kernel frees the lock.

        Raises :class:`UsageError` naming the process that holds it.
        """
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock_file.open("a+", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"another spr-cluster command (PID {file.read().partition(' ')[0] or 'unknown'}) "
                    f"is using cluster {self.folder.name!r}",
                    hint="wait for it to finish, or stop it with Ctrl-C",
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()} {command}")
            file.flush()
            yield

    @property
    def _lock_file(self) -> Path:
        """Beside the folder, because ``down`` empties that."""
        return self.folder.with_name(f".{self.folder.name}.lock")

    def user(self) -> tuple[str, int] | None:
        """Return the command that is changing the cluster, and its PID."""
        try:
            with self._lock_file.open() as file:
                pid, _, command = file.read().partition(" ")
                # Only a live process can hold the lock; don't take a free one without need.
                with suppress(PermissionError):
                    os.kill(int(pid), 0)
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return command, int(pid)
        except (OSError, ValueError):
            return None
        return None

    def remove(self, *, keep_cloud: bool = False) -> None:
        """Remove everything except the event log; ``keep_cloud`` keeps the record of cloud and region."""
        kept = {self.events, self.ssh_config} if keep_cloud else {self.events}
        for path in set(self.folder.glob("*")) - kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def cluster_names(folder: str | None = None) -> list[str]:
    """Return the clusters that this machine created: all, or those in one embedded cloud's folder."""
    paths = sorted(home().glob("*/ssh_config")) if home().is_dir() else ()
    names = (path.parent.name for path in paths)
    ours = (name for name in names if re.fullmatch(CLUSTER_NAME, name))
    return [name for name in ours if folder is None or _read_place(name)[2:] == [folder]]


def remembered_cloud(cluster: str) -> tuple[str, str] | None:
    """Return the cloud and region of a cluster, if this machine created it."""
    cloud, region, *_ = (*_read_place(cluster), "", "")
    return (cloud, region) if region else None


def remembered_account(cluster: str) -> tuple[str, str]:
    """Return the account and AWS profile that created a cluster on this machine; "" if unknown."""
    account, profile, *_ = (*_read_line(cluster, 1, _ACCOUNT_LINE, 1), "", "")
    return account, profile


def _read_place(cluster: str) -> list[str]:
    """Return cloud, region, and the embedded cloud's folder, as far as they are recorded."""
    return _read_line(cluster, 0, _CLOUD_LINE, 2)


def _read_line(cluster: str, number: int, label: str, splits: int) -> list[str]:
    try:
        line = read_text(ClusterFiles.of(cluster).ssh_config).split("\n")[number]
        return line.split(label)[1].split(maxsplit=splits)
    except (UsageError, IndexError):
        return []


def known_clusters(cloud: str | None = None) -> dict[str, tuple[str, str]]:
    """Return cloud and region of the clusters that this machine created, in one or all clouds."""
    places = {name: place for name in cluster_names() if (place := remembered_cloud(name))}
    return {name: place for name, place in places.items() if cloud in (None, place[0])}


def nearest_cluster(name: str) -> str:
    """Return ``; did you mean NAME?`` if this machine knows a similar name but not this one."""
    known = known_clusters()
    return "" if name in known else nearest(name, known)


def place_options(name: str, cloud: str, region: str) -> str:
    """Return ``--cloud`` and ``--region`` for commands in messages; "" if this machine knows them."""
    implied = remembered_cloud(name) == (cloud, region)
    return "" if implied else f" --cloud {cloud} --region {region}"


# Reasons quote the messages of failed commands, whose output may contain anything.
_SECRETS = (
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL),
    re.compile(r"(://)[^/\s@]+(?=@)"),
    re.compile(r"(?i)((?:password|secret|token)\w*\W{0,3}[=:]\W{0,3})[\w/+.=-]{8,}"),
)


def utc_now() -> datetime:
    """Return the time in UTC, from the cloud's clock if this machine's is wrong."""
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
        """Append one event. Failure to write the log stops no command."""
        line = {
            "time": render_time(self.now()),
            "command": self.command,
            "version": read_version(),
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
        kind = action.kind.name.lower()
        self.record(event, action.title, reason=reason, resources=action.ids, action=kind)

    def read(self) -> list[dict[str, Any]]:
        """Return the events, oldest first, skipping damaged lines."""
        lines = read_text(self.path, "", errors="replace").split("\n")
        return [event for line in lines if (event := _parse(line)) is not None]

    def bought(self, since: datetime) -> list[dict[str, Any]]:
        """Return the purchases of the cluster's machines by this machine since a time."""
        first = render_time(since)
        return [e for e in self.read() if e["event"] == "bought" and e["time"] >= first]

    def former_s(
        self,
        created: datetime,
        after: datetime | None = None,
        ends: Mapping[str, datetime] = MappingProxyType({}),
    ) -> float:
        """Return the seconds that a cluster's former machines ran, or those ``after`` a time.

        A machine counts from its purchase, once the cluster was ``created``, to the first plan without it:
        longer than it ran if EC2 ended it earlier. Until there is one, ``ends`` are the known ends by
        instance ID. EC2 does not bill one that never booted.
        """
        began, ended = self._spans(created)
        spans = (
            end - max(began[id_], after or created)
            for id_, end in {**ends, **ended}.items()
            if id_ in began
        )
        return sum(max(0.0, span.total_seconds()) for span in spans)

    def ran(self, since: datetime) -> set[str]:
        """Return the machines that were bought since a time and ran."""
        return {*self._spans(since)[0]}

    def unended(self, created: datetime) -> set[str]:
        """Return a cluster's machines that ran, and whose end this log does not know."""
        began, ended = self._spans(created)
        return began.keys() - ended.keys()

    def _spans(self, created: datetime) -> tuple[dict[str, datetime], dict[str, datetime]]:
        """Return when the machines that ran were bought, and the first plans without them."""
        began, ended = dict[str, datetime](), dict[str, datetime]()
        for event in self.read():
            kind, ids = event["event"], event["resources"]
            with suppress(ValueError):  # a damaged line
                time = parse_time(event["time"])
                if kind == "bought" and time >= created:
                    began |= dict.fromkeys(ids, time)
                elif kind == "faulty" and event.get("ran") is False:
                    began = {id_: began[id_] for id_ in began.keys() - ids}
                elif kind == "plan":  # it may keep a machine that EC2 did not list before
                    ended = {id_: ended.get(id_, time) for id_ in began.keys() - ids}
        return began, ended


def describe_failure(error: BaseException) -> str:
    """Return an exception's message, or its type if it has none."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
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
