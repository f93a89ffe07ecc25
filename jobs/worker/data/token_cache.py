"""Tokenize texts on all ranks together, and cache the tokens on each node's disk for later jobs.

One file per key in numpy's format (npz, uncompressed): zip's checksums detect damage, and reading takes about
a fifth of the tokenizing time (``benchmarks.tokenize``).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ..runtime.errors import first_line
from ..runtime.ranks import Ranks
from .tokens import Column, Tokens, encode, join_tokens

VERSION = 2
"""Increase it when the code produces different tokens for the same texts."""
LIMIT_BYTES = 2 * 1024**3
"""Maximum size of all files; the least recently used ones are removed."""
_STALE_SECONDS = 3600
"""Older unfinished files belong to a failed job."""


def token_key(columns: Sequence[Column], tokenizer: Any) -> str:
    """Return a digest of everything that determines the tokens: texts, tokenizer, library, code."""
    # Truncation and padding depend on the tokenizer's last call and are excluded.
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings |= {"truncation": None, "padding": None}
    digest = hashlib.sha256(json.dumps([VERSION, tokenizers.__version__, settings]).encode())
    for texts, offsets in columns:
        digest.update(b"\xfe" * 8 if offsets else b"")
        for text in texts:
            content = text.encode()
            digest.update(len(content).to_bytes(8, "big"))
            digest.update(content)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()[:32]


def encode_together(
    ranks: Ranks,
    columns: Sequence[Column],
    tokenizer: Any,
    cache: TokenCache | None,
    note: Callable[[str], None],
) -> list[Tokens]:
    """Return each column's tokens on every rank: from its node's cache, or encoded by all ranks.

    If one node lacks them, all ranks share the work, since they would have to wait anyway. Raises
    :class:`DatasetError`.
    """
    key = token_key(columns, tokenizer)
    found = cache.load(key) if cache else None
    known: list[tuple[str, bool]] = ranks.gather((socket.gethostname(), found is not None))
    if found is not None and all(there for _, there in known):
        return found
    shares = [column._replace(texts=share_texts(column.texts, ranks)) for column in columns]
    parts = ranks.gather(encode(shares, tokenizer))
    encoded = [join_tokens(column) for column in zip(*parts, strict=True)]
    hosts = [host for host, _ in known]
    if cache and hosts.index(hosts[ranks.rank]) == ranks.rank:  # the first rank of its node
        try:
            cache.store(key, encoded)
        except OSError as error:
            note(f"tokens were not cached for the next job: {first_line(error)}")
    return encoded


def share_texts(texts: Sequence[str], ranks: Ranks) -> Sequence[str]:
    """Return one rank's part of the texts. The parts, in rank order, have about equal size."""
    if not texts:
        return texts
    ends = np.cumsum([len(text) for text in texts])
    shares = [ends[-1] * rank / ranks.size for rank in (ranks.rank, ranks.rank + 1)]
    first, last = (int(place) for place in np.searchsorted(ends, shares))
    return texts[first : len(texts) if ranks.rank + 1 == ranks.size else last]


class TokenCache:
    """A folder of tokens by key. It never fails a job: unreadable tokens are recreated."""

    def __init__(self, folder: str | Path, limit: int = LIMIT_BYTES) -> None:
        self._folder = Path(os.path.expanduser(folder))  # noqa: PTH111 - pathlib's fails without a home
        self._limit = limit

    def load(self, key: str) -> list[Tokens] | None:
        """Return the tokens; ``None`` if there are none. A damaged file is removed."""
        path = self._path(key)
        try:
            found = _read(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        # A damaged file can raise anything.
        except Exception:
            with suppress(OSError):
                path.unlink()
            return None
        return found

    def store(self, key: str, columns: Sequence[Tokens]) -> None:
        """Write tokens atomically. Raises ``OSError``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f".{key}.{os.getpid()}.partial"
        arrays = {
            f"{number}_{kind}": array
            for number, tokens in enumerate(columns)
            for kind, array in tokens._asdict().items()
        }
        try:
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            partial.replace(self._path(key))
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._shrink(self._path(key))

    def _shrink(self, newest: Path) -> None:
        """Remove the oldest files until the others are within the limit."""
        stale = time.time() - _STALE_SECONDS
        files = []
        for path in (*self._folder.glob("*.npz"), *self._folder.glob(".*.partial")):
            # Another job may remove files at the same time.
            with suppress(OSError):
                facts = path.stat()
                if path.suffix == ".npz":
                    files.append((path != newest, facts.st_mtime, facts.st_size, path))
                elif facts.st_mtime < stale:
                    path.unlink()
        total = 0
        # Newest first: the newest is kept even if it alone exceeds the limit.
        for _, _, size, path in sorted(files, key=lambda file: (file[0], -file[1])):
            total += size
            if total > self._limit and path != newest:
                with suppress(OSError):
                    path.unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.npz"


def _read(path: Path) -> list[Tokens]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        columns = [
            Tokens(*(arrays[f"{number}_{kind}"] for kind in Tokens._fields))
            for number in range(len(arrays.files) // len(Tokens._fields))
        ]
    if not columns:
        raise ValueError("no columns")
    for tokens in columns:
        if tokens.bounds[-1] != len(tokens.ids):
            raise ValueError("the parts do not match")
    return columns
