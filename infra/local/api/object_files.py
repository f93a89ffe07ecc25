"""The contents of S3's objects, each in a file: moto keeps them in memory, even those of deleted objects."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from moto.s3 import models


class ObjectFile:
    """The file of an object, a version, or a part, with the methods that moto needs."""

    folder: ClassVar[Path]
    pickled: ClassVar[set[str]] = set()
    """The names of the files to which pickled keys refer."""
    _position: ClassVar[Any] = threading.local()
    """Where this thread reads next: moto computes an ETag while other threads read the object."""

    def __init__(self, _: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without the folder, which the user may move.
        self._name = secrets.token_hex(16)

    @property
    def _path(self) -> Path:
        return self.folder / self._name

    def __getstate__(self) -> dict[str, Any]:
        self.pickled.add(self._name)
        return vars(self)

    def seek(self, at: int) -> None:
        self._position.at = at

    def truncate(self) -> None:
        """Do nothing: a write replaces the content."""

    def write(self, content: bytes) -> None:
        try:
            self._path.write_bytes(content)
        except OSError:
            # On a full disk, it would leave no space for a save, and so never be removed.
            self._path.unlink(missing_ok=True)
            raise

    def read(self, size: int = -1) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._position.at)
            content = file.read(size)
            self._position.at = file.tell()
        return content


def keep_contents(folder: Path) -> None:
    """Make moto keep the contents of new objects in this folder, and pickle keys without them."""
    moto: Any = models
    ObjectFile.folder, moto.tempfile = folder, SimpleNamespace(SpooledTemporaryFile=ObjectFile)
    key: Any = models.FakeKey
    # :func:`remove_unused` deletes a file when no saved key refers to it.
    key.dispose = lambda *_, **__: None
    key.__getstate__ = lambda self: {**vars(self), "lock": None}
    key.__setstate__ = lambda self, state: self.__dict__.update(state, lock=threading.Lock())


def remove_unused(folder: Path) -> None:
    """Delete the contents to which no pickled key refers."""
    for path in folder.glob("*"):
        if path.name not in ObjectFile.pickled:
            path.unlink(missing_ok=True)
