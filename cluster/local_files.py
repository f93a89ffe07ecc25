"""Files kept on this machine for a cluster: its key, host keys, SSH configuration, and event log."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.errors import UsageError
from infra.files import read_text, write_private
from infra.spec import CLUSTER_NAME, CLUSTER_NAME_RULE
from infra.words import nearest
from provision.host import SSH_USER, Login

_CLOUD_LINE = "# spr-cluster lives in:"
_ACCOUNT_LINE = "# spr-cluster account:"


def home() -> Path:
    """``$SPR_CLUSTER_HOME``, else ``~/.spr-cluster``."""
    place = os.environ.get("SPR_CLUSTER_HOME") or "~/.spr-cluster"
    return Path(os.path.expanduser(place))  # noqa: PTH111 - pathlib raises for an unknown ~name


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
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def removal(self) -> Path:
        """Exists from the first deletion of `down` until its end, and names where that was."""
        return self.folder / "removal"

    @property
    def exist(self) -> bool:
        """Whether this machine keeps anything of the cluster; its event log does not count."""
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

        ``folder`` is that of an embedded cloud; ``profile`` is the AWS profile that was used.
        """
        if ssh_config or not self.ssh_config.exists():
            first = f"{_CLOUD_LINE} {cloud} {region} {folder}".rstrip()
            second = f"{_ACCOUNT_LINE} {account} {' '.join(profile.split())}".rstrip()
            head = f"{first}\n{second}\n" if account else f"{first}\n"
            write_private(self.ssh_config, head + ssh_config)

    @contextmanager
    def lock(self, command: str = "") -> Iterator[None]:
        """Let one command at a time change a cluster; the kernel frees the lock.

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
        """Return the command that changes the cluster now, and its PID."""
        try:
            with self._lock_file.open() as file:
                pid, _, command = file.read().partition(" ")
                # Only a living process can hold the lock, and a free one is not touched for nothing.
                with suppress(PermissionError):
                    os.kill(int(pid), 0)
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return command, int(pid)
        except (OSError, ValueError):
            return None
        return None

    def remove(self, *, keep_cloud: bool = False) -> None:
        """Remove everything but the event log; ``keep_cloud`` keeps the cluster's cloud and region."""
        kept = {self.events, self.ssh_config} if keep_cloud else {self.events}
        for path in set(self.folder.glob("*")) - kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def cluster_names(folder: str | None = None) -> list[str]:
    """Return the names of the clusters that this machine made: all, or those of an embedded cloud."""
    paths = sorted(home().glob("*/ssh_config")) if home().is_dir() else ()
    names = (path.parent.name for path in paths)
    ours = (name for name in names if re.fullmatch(CLUSTER_NAME, name))
    return [name for name in ours if folder is None or _read_place(name)[2:] == [folder]]


def remembered_cloud(cluster: str) -> tuple[str, str] | None:
    """Return the cloud and region in which this machine made a cluster, if it did."""
    cloud, region, *_ = (*_read_place(cluster), "", "")
    return (cloud, region) if region else None


def remembered_account(cluster: str) -> tuple[str, str]:
    """Return the account and the AWS profile with which this machine made a cluster, "" if unknown."""
    account, profile, *_ = (*_read_line(cluster, 1, _ACCOUNT_LINE, 1), "", "")
    return account, profile


def _read_place(cluster: str) -> list[str]:
    """Return cloud, region, and the embedded cloud's folder, as far as this machine knows them."""
    return _read_line(cluster, 0, _CLOUD_LINE, 2)


def _read_line(cluster: str, number: int, label: str, splits: int) -> list[str]:
    try:
        line = read_text(ClusterFiles.of(cluster).ssh_config).split("\n")[number]
        return line.split(label)[1].split(maxsplit=splits)
    except (UsageError, IndexError):
        return []


def known_clusters(cloud: str | None = None) -> dict[str, tuple[str, str]]:
    """Return cloud and region of the clusters that this machine made, in one cloud or in all."""
    places = {name: place for name in cluster_names() if (place := remembered_cloud(name))}
    return {name: place for name, place in places.items() if cloud in (None, place[0])}


def is_idle_here(cluster: str) -> bool:
    """Return whether only this machine could change a cluster, and it does not: it has the key."""
    if not re.fullmatch(CLUSTER_NAME, cluster):
        return False
    files = ClusterFiles.of(cluster)
    return files.key.exists() and files.user() is None


def nearest_cluster(name: str) -> str:
    """``; did you mean NAME?`` if this machine knows a similar name, but not this one."""
    known = known_clusters()
    return "" if name in known else nearest(name, known)


def place_options(name: str, cloud: str, region: str) -> str:
    """Return ``--cloud`` and ``--region`` for a command in a message, if this machine does not know them."""
    implied = remembered_cloud(name) == (cloud, region)
    return "" if implied else f" --cloud {cloud} --region {region}"
