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

    pickled: ClassVar[set[str]] = set()
    """The names of the files to which pickled keys refer."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._at = folder / secrets.token_hex(16), 0

    def __getstate__(self) -> dict[str, Any]:
        self.pickled.add(self._path.name)
        return vars(self)

    def seek(self, at: int) -> None:
        self._at = at

    def truncate(self) -> None:
        """Do nothing: a write replaces the content."""

    def write(self, content: bytes) -> None:
        self._path.write_bytes(content)

    def read(self, size: int = -1) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = file.read(size)
            self._at = file.tell()
        return content

    def close(self) -> None:
        """Do nothing: :func:`remove_unused` deletes the file when no saved key refers to it."""


def keep_contents(folder: Path) -> None:
    """Make moto keep the contents of new objects in this folder, and pickle keys without them."""
    moto: Any = models
    moto.tempfile = SimpleNamespace(SpooledTemporaryFile=lambda _: ObjectFile(folder))
    key: Any = models.FakeKey
    key.__getstate__ = lambda self: {**vars(self), "lock": None}
    key.__setstate__ = lambda self, state: self.__dict__.update(state, lock=threading.Lock())


def remove_unused(folder: Path) -> None:
    """Delete the contents to which no pickled key refers."""
    for path in folder.glob("*"):
        if path.name not in ObjectFile.pickled:
            path.unlink(missing_ok=True)
