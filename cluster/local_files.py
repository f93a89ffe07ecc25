"""The only things kept on this machine: a cluster's key, host keys and ssh configuration."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.errors import UsageError
from infra.key_pair import write_private
from infra.spec import CLUSTER_NAME, CLUSTER_NAME_RULE
from provision.host import SSH_USER, Login

_CLOUD_LINE = "# spr-cluster lives in:"


def home() -> Path:
    """``$SPR_CLUSTER_HOME``, else ``~/.spr-cluster``."""
    place = os.environ.get("SPR_CLUSTER_HOME") or "~/.spr-cluster"
    return Path(os.path.expanduser(place))  # noqa: PTH111 - pathlib's fails for a ~name of nobody


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
    def login(self) -> Login:
        return Login(self.key, self.known_hosts, SSH_USER)

    def remember(self, cloud: str, region: str, ssh_config: str = "") -> None:
        """Note where the cluster lives, in the first line of its ssh configuration."""
        if ssh_config or not self.ssh_config.exists():
            write_private(self.ssh_config, f"{_CLOUD_LINE} {cloud} {region}\n{ssh_config}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One command at a time changes a cluster from this machine; the kernel frees the lock.

        Raises :class:`UsageError` naming the process that has it. It lies beside the folder, which
        ``down`` removes.
        """
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.folder.with_name(f".{self.folder.name}.lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"another spr-cluster command (process {file.read().strip() or 'unknown'}) "
                    f"is at work on cluster {self.folder.name!r}",
                    hint="wait for its end, or end it with Ctrl-C first",
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def remove(self, *, keep_cloud: bool = False) -> None:
        """Remove the folder; ``keep_cloud`` keeps the note of where an image is still kept."""
        for path in (self.key, self.known_hosts):
            path.unlink(missing_ok=True)
        if not keep_cloud:
            shutil.rmtree(self.folder, ignore_errors=True)


def cluster_names(cloud: str | None = None) -> list[str]:
    """Return the names of the clusters that this machine made, in one cloud or in all."""
    folders = home().glob("*/ssh_config") if home().is_dir() else ()
    names = sorted(path.parent.name for path in folders)
    clouds = {name: (remembered_cloud(name) or ("", ""))[0] for name in names}
    return [name for name in names if cloud in (None, clouds[name])]


def remembered_cloud(cluster: str) -> tuple[str, str] | None:
    """The cloud and region in which this machine made a cluster of that name, if it did."""
    try:
        with ClusterFiles.of(cluster).ssh_config.open() as file:
            first = file.readline()
        cloud, region = first.split(_CLOUD_LINE)[1].split()
    except (OSError, ValueError, IndexError):
        return None
    return cloud, region
