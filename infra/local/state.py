"""The state folder of an embedded cloud: credentials, snapshots, images, and log."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import pickle
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field

from infra.errors import CloudError, UsageError
from infra.files import open_private, parse_as, read_text, write_private
from infra.version import read_version

RESET_HINT = "discard this embedded cloud: spr-cluster local reset --keep-base"
# The server's own page, next to EC2's API, which opens a region.
STATUS_PATH = "/spr-cluster/status"
# A snapshot pickles moto's objects and ours, so only the same release of both may load it.
_FORMAT = 8
_DIGEST = hashlib.sha256().digest_size


class _FolderPath:
    """A file or folder inside a :class:`StateFolder`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: StateFolder, _: object = None) -> Path:
        return folder.root / self._name


@dataclass(frozen=True)
class StateFolder:
    """The paths of one embedded cloud; ``key`` labels its containers."""

    root: Path

    # The access key and secret that sign calls to the server.
    credentials_file = _FolderPath("credentials")
    server_file = _FolderPath("server.json")
    log = _FolderPath("server.log")
    snapshot = _FolderPath("ec2.pickle")
    # The containers that `local stop` stopped, one per line: they did not shut themselves down.
    suspended = _FolderPath("suspended")
    pip_conf = _FolderPath("pip.conf")
    # What its machines start from, unless it is the default.
    base_file = _FolderPath("base")
    # One folder with a whole disk per AMI created here.
    images = _FolderPath("images")
    # S3's buckets, and a folder with the contents of their objects.
    buckets = _FolderPath("s3.pickle")
    objects = _FolderPath("objects")

    @property
    def key(self) -> str:
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @staticmethod
    def of_user() -> StateFolder:
        """Return this user's folder: ``SPR_CLUSTER_LOCAL_CLOUD``, else one in ``SPR_CLUSTER_HOME``.

        ``SPR_CLUSTER_HOME`` defaults to ``~/.spr-cluster``; several homes can share one cloud. Raises
        :class:`UsageError` if another user could have written to the folder.
        """
        if chosen := os.environ.get("SPR_CLUSTER_LOCAL_CLOUD"):
            path = Path(chosen).expanduser().absolute()
        else:
            home = os.environ.get("SPR_CLUSTER_HOME") or "~/.spr-cluster"
            path = Path(home).expanduser().resolve() / ".local-cloud"
        # Do not resolve a link, so that :meth:`check` can reject it.
        folder = StateFolder(path if path.is_symlink() else path.resolve())
        folder.check()
        return folder

    def check(self) -> None:
        """Raise :class:`UsageError` if the folder exists and another user could write to it.

        Loading its snapshot can execute code, and commands trust its server address and secret.
        """
        try:
            found = self.root.lstat()
        except FileNotFoundError:
            return
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISLNK(found.st_mode):
            reason = "is a symbolic link"
        elif found.st_uid != os.geteuid():
            reason = "belongs to another user"
        elif mode & 0o077:
            reason = f"is open to other users (mode {mode:o})"
        else:
            return
        raise UsageError(
            f"{self.root}, the folder of the embedded cloud, {reason}",
            hint=f"if nobody else has written to it: chmod 700 {self.root}; otherwise, choose another "
            "with SPR_CLUSTER_LOCAL_CLOUD",
        )

    def credentials(self) -> tuple[str, str]:
        """Return this cloud's access key and secret; the first call generates them."""
        try:
            key, secret = self.credentials_file.read_text().split()
        except (FileNotFoundError, ValueError):
            key, secret = f"LOCAL{secrets.token_hex(8).upper()}", secrets.token_hex(20)
            write_private(self.credentials_file, f"{key} {secret}\n")
        return key, secret

    def seed(self, instance_id: str) -> Path:
        return self.root / "seeds" / instance_id

    def create(self) -> None:
        """Create the folder, readable only by its owner, because user data can contain secrets."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check()

    @contextmanager
    def command_lock(self, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Hold the lock that lets only one command at a time start, stop, or reset this cloud.

        The lock file is next to the folder, because ``reset`` removes the folder.
        """
        path = self.root.with_name(f"{self.root.name}.lock")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as file:
            _lock(file, on_wait)
            yield


@contextmanager
def machine_lock(name: str, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock that all embedded clouds on this machine share."""
    # In /tmp, root would follow another user's link.
    folder = (
        Path("/run/spr-cluster") if os.access("/run", os.W_OK) else Path.home() / ".spr-cluster"
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(folder / f"{name}.lock", flags, 0o600), "w") as file:
        _lock(file, on_wait)
        yield


def _lock(file: IO[str], on_wait: Callable[[], object]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


@dataclass(frozen=True)
class ServerAddress:
    """The server's process and port. The next server reuses the port if it is free."""

    pid: int
    port: Annotated[int, Field(ge=1, le=65535)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write(self, folder: StateFolder) -> None:
        write_private(folder.server_file, json.dumps(asdict(self)))

    @staticmethod
    def read(folder: StateFolder) -> ServerAddress | None:
        """Return the last server's address, or ``None`` without a valid file."""
        try:
            return parse_as(ServerAddress, read_text(folder.server_file), "server")
        except UsageError:
            return None


@cache
def snapshot_release() -> tuple[str, int]:
    """Return moto's version and the format of snapshots, as of this process's start."""
    return version("moto"), _FORMAT


def release_of(base: str) -> list[str]:
    """Return this tool's release and the base image's hash. If one changes, the server is replaced."""
    return [read_version().partition("+")[0], base]


def save_snapshot(file: Path, backends: dict[str, Any]) -> None:
    """Save EC2's state in all regions in use, or S3's buckets."""
    moto, form = snapshot_release()
    content = pickle.dumps({"format": form, "moto": moto}) + pickle.dumps(backends)
    with open_private(file) as opened:
        opened.write(hashlib.sha256(content).digest() + content)


def load_snapshot(file: Path) -> dict[str, Any]:
    """Return the state saved in a file of a :class:`StateFolder`, or ``{}`` without one.

    Raises :class:`CloudError` if the file is unusable.
    """
    StateFolder(file.parent).check()
    moto, form = snapshot_release()
    try:
        saved = file.read_bytes()
        digest, content = saved[:_DIGEST], saved[_DIGEST:]
        # Unpickling damaged data could allocate any amount of memory.
        if digest != hashlib.sha256(content).digest():
            raise ValueError("it is damaged, or from another release")
        # Only this user can write to the folder, so its pickles are as safe as the user's other files.
        stream = io.BytesIO(content)
        header = pickle.load(stream)
        if (header["format"], header["moto"]) == (form, moto):
            return dict(pickle.load(stream))
        reason = (
            f"written by moto {header['moto']} in format {header['format']}, "
            f"this is {moto} with format {form}"
        )
    except FileNotFoundError:
        return {}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise CloudError(f"{file} can't be read: {reason}", hint=RESET_HINT)
