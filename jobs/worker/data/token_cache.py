"""Tokenize texts on all ranks together, and cache the tokens on each node's disk for later jobs.

One folder per key, whose files a node's ranks map: they may be larger than the memory. A checksum detects
damage, and reading takes about a fifth of the tokenizing time (benchmarks/log.jsonl).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ..runtime.errors import first_line
from ..runtime.ranks import Ranks
from .mapped import process_suffix, remove_unused
from .tokens import Column, Tokens, encode, join_tokens

VERSION = 3
"""Increase it when the code produces different tokens for the same texts."""
LIMIT_SHARE = 4
"""Part of the disk that all files may fill; the least recently used ones are removed."""
BLOCK = 1 << 24
"""Characters that each rank tokenizes before the ranks exchange the tokens."""
_KIND, _CHECKSUM = ".tokens", "checksum"
_TYPES = {"ids": np.int32, "bounds": np.int64, "offsets": np.int32}
"""Of the arrays, each of which is a file for each column, such as ``0_ids``."""


def token_key(columns: Sequence[Column], tokenizer: Any) -> str:
    """Return a digest of everything that determines the tokens: texts, tokenizer, library, code."""
    # Truncation and padding depend on the tokenizer's last call and are excluded.
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings |= {"truncation": None, "padding": None}
    settings |= {"split_special_tokens": tokenizer.split_special_tokens}
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
    key = token_key(columns, tokenizer) if cache else ""
    found = cache.load(key) if cache else None
    known: list[tuple[str, bool]] = ranks.gather((socket.gethostname(), found is not None))
    if found is not None and all(there for _, there in known):
        return found
    hosts = [host for host, _ in known]
    spool = None
    if cache and hosts.index(hosts[ranks.rank]) == ranks.rank:  # the first rank of its node
        spool = Spool(cache, key)
    kept: list[list[Tokens]] = [[] for _ in columns]
    for number, column in enumerate(columns):
        for block in _blocks(column.texts, BLOCK * ranks.size):
            share = column._replace(texts=share_texts(block, ranks))
            tokens = join_tokens(ranks.gather(encode([share], tokenizer)[0]))
            if spool:
                spool.append(number, tokens)
            elif cache is None:
                kept[number].append(tokens)
    if cache is None:
        return [join_tokens(parts) for parts in kept]
    why = spool.finish() if spool else ""
    troubles = [each for each in ranks.gather(why) if each]
    found = None if troubles else cache.load(key)
    if all(ranks.gather(found is not None)):
        assert found is not None
        return found
    for trouble in troubles[:1]:
        note(f"tokens were not cached for the next job: {trouble}")
    return encode_together(ranks, columns, tokenizer, None, note)


def compute_once(
    ranks: Ranks,
    cache: TokenCache | None,
    key: str,
    compute: Callable[[], NDArray[np.float32]],
    note: Callable[[str], None],
) -> NDArray[np.float32]:
    """Return an array, the same on every rank: from the nodes' caches, or computed by all ranks together.

    A run that starts again has the same numbers, also on a replaced node: it gets those of another one.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    (tokens,) = (cache.load(name) if cache else None) or (None,)
    own = None
    if tokens is not None:
        own = tokens.ids.view(np.float32).reshape(len(tokens.bounds) - 1, -1)
    known = ranks.gather(None if own is None else crc32(own.tobytes()))
    having = [rank for rank, each in enumerate(known) if each is not None]
    if own is not None and known == [known[0]] * ranks.size:
        return own
    found: NDArray[np.float32] | None = None
    if having:
        found = ranks.gather(own if ranks.rank == having[0] else None)[having[0]]
    found = compute() if found is None else found
    hosts, why = ranks.gather(socket.gethostname()), ""
    if cache and hosts.index(hosts[ranks.rank]) == ranks.rank:  # the first rank of its node
        rows, width = found.shape
        kept = Tokens(found.view(np.int32).ravel(), np.arange(rows + 1) * width)
        why = cache.store(name, [kept])
    for trouble in [each for each in ranks.gather(why) if each][:1]:
        note(f"not kept, so a run that starts again computes it again: {trouble}")
    return found


def _blocks(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield all texts in blocks of about so many characters, at least one block."""
    block, length = list[str](), 0
    for text in texts:
        block.append(text)
        length += len(text)
        if length >= size:
            yield block
            block, length = [], 0
    if block or not texts:
        yield block


class Spool:
    """Tokens on their way to a cache. After an error, it takes no more."""

    def __init__(self, cache: TokenCache, key: str) -> None:
        self._cache, self._key, self._why = cache, key, ""
        self._folder = cache.folder / f".{key}{process_suffix()}.partial"
        # A restarted container's process may have a killed one's ID.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ends: dict[int, int] = {}
        """Each column's number of tokens so far."""

    def append(self, column: int, tokens: Tokens) -> None:
        """Add the next texts of a column."""
        bounds = tokens.bounds + self._ends.get(column, 0)
        own = tokens._replace(bounds=bounds[column in self._ends :])
        self._ends[column] = int(bounds[-1])
        if self._why:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.utime(self._folder)  # another job would remove an old one
            for name, array in own._asdict().items():
                with (self._folder / f"{column}_{name}").open("ab") as file:
                    file.write(np.ascontiguousarray(array).data)
        except OSError as error:
            self._why = first_line(error)

    def finish(self) -> str:
        """Move all columns to the cache; return why that failed, if it did."""
        try:
            if not self._why:
                (self._folder / _CHECKSUM).write_text(_checksum(_map_columns(self._folder)))
                self._cache.take(self._folder, self._key)
        except OSError as error:
            self._why = first_line(error)
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._why


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

    def __init__(self, folder: str | Path, limit: int | None = None) -> None:
        self.folder = Path(os.path.expanduser(folder))  # noqa: PTH111 - pathlib's fails without a home
        self._limit = limit

    def load(self, key: str) -> list[Tokens] | None:
        """Return the tokens; ``None`` if there are none. Damaged ones are removed."""
        path = self._path(key)
        if not path.exists():  # another job may finish it now
            return None
        try:
            found = _map_columns(path)
            if (path / _CHECKSUM).read_text() != _checksum(found):
                raise ValueError("the checksum is wrong")
            os.utime(path)
        # A damaged file can raise anything.
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            return None
        return found

    def store(self, key: str, columns: Sequence[Tokens]) -> str:
        """Write tokens atomically; return why that failed, if it did."""
        spool = Spool(self, key)
        for number, tokens in enumerate(columns):
            spool.append(number, tokens)
        return spool.finish()

    def take(self, folder: Path, key: str) -> None:
        """Take the tokens of a folder, unless another job has made them meanwhile. Raises ``OSError``."""
        target = self._path(key)
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
        remove_unused(self.folder)
        self._shrink(target)

    def _shrink(self, newest: Path) -> None:
        """Remove the oldest tokens until the others are within the limit."""
        found = []
        for path in self.folder.glob(f"*{_KIND}"):
            # Another job may remove files at the same time.
            with suppress(OSError):
                size = sum(each.stat().st_size for each in path.iterdir())
                found.append((path != newest, -path.stat().st_mtime, size, path))
        total, limit = 0, self._limit or shutil.disk_usage(self.folder).total // LIMIT_SHARE
        # Newest first: the newest is kept even if it alone exceeds the limit.
        for is_other, _, size, path in sorted(found):
            total += size
            if total > limit and is_other:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_KIND}"


def _map_columns(folder: Path) -> list[Tokens]:
    columns = range(len([*folder.glob("*_ids")]))
    return [
        Tokens(*(_map(folder / f"{number}_{name}", kind) for name, kind in _TYPES.items()))
        for number in columns
    ]


def _map(path: Path, kind: Any) -> Any:
    shape = (-1, 2) if path.name.endswith("offsets") else (-1,)
    is_empty = not path.stat().st_size  # which can't be mapped
    found = np.zeros(0, kind) if is_empty else np.asarray(np.memmap(path, kind, "r"))
    return found.reshape(shape)


def _checksum(columns: Sequence[Tokens]) -> str:
    found = 0
    for tokens in columns:
        for array in tokens:
            found = crc32(array.ravel().data, found)
    return f"{len(columns)} {found}"
