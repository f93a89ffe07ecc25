"""Tokens: their cache, and the digests that tell a resumed run whether its data have changed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from jobs.worker.data.token_cache import (
    Spool,
    TokenCache,
    compute_once,
    encode_together,
    token_key,
)
from jobs.worker.data.tokens import Column, TextSamples, Tokens, encode, read_template
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.squad.dataset import Question
from jobs.worker.tasks.squad.features import Encoded, Features, Texts, build_features, collect_texts
from tests.jobs.worker.threaded_ranks import run_threaded


@pytest.fixture(scope="module")
def texts(questions: list[Question]) -> Texts:
    return collect_texts(questions)


@pytest.fixture(scope="module")
def encoded(texts: Texts, tokenizer: Any) -> Encoded:
    return Encoded(*encode(texts.columns, tokenizer))


def same(one: Sequence[Tokens] | None, other: Sequence[Tokens]) -> bool:
    return one is not None and all(
        np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
        for mine, theirs in zip(arrays(one), arrays(other), strict=True)
    )


def arrays(encoded: Sequence[Tokens]) -> list[Any]:
    return [array for part in encoded for array in part]


@pytest.mark.parametrize("name", ["0_ids", "0_offsets", "1_bounds", "checksum"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut short", "one bit"])
def test_damaged_tokens_are_removed(
    tmp_path: Path, encoded: Encoded, name: str, damage: str
) -> None:
    cache = TokenCache(tmp_path)
    assert cache.store("key", encoded) == ""
    path = tmp_path / "key.tokens" / name
    content, middle = path.read_bytes(), path.stat().st_size // 2
    if damage == "missing":
        path.unlink()
    elif damage == "one bit":
        flipped = bytes([content[middle] ^ 1])
        path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    else:
        path.write_bytes(content[:-1] if damage == "cut short" else b"")
    assert cache.load("key") is None
    assert not path.parent.exists()
    cache.store("key", encoded)
    assert same(cache.load("key"), encoded)
    assert cache.load("other") is None
    assert [each.name for each in tmp_path.iterdir()] == ["key.tokens"]


def test_the_least_used_files_go_first(tmp_path: Path, encoded: Encoded) -> None:
    TokenCache(tmp_path).store("size", encoded)
    size = sum(each.stat().st_size for each in (tmp_path / "size.tokens").iterdir())
    shutil.rmtree(tmp_path / "size.tokens")
    cache = TokenCache(tmp_path, limit=3 * size)
    for age, key in enumerate(("oldest", "used", "third")):
        cache.store(key, encoded)
        os.utime(tmp_path / f"{key}.tokens", (1000 + age, 1000 + age))
    assert cache.load("oldest")  # is now the one used last
    cache.store("new", encoded)
    assert {path.stem for path in tmp_path.iterdir()} == {"oldest", "third", "new"}

    TokenCache(tmp_path, limit=1).store("big", encoded)
    assert [path.stem for path in tmp_path.iterdir()] == ["big"], "what was just made stays"


def test_what_failed_or_killed_jobs_left_is_removed(tmp_path: Path, encoded: Encoded) -> None:
    dead, alive = tmp_path / ".a.1.partial", tmp_path / ".b.2.partial"
    for path in (dead, alive):
        path.write_bytes(b"part")
    os.utime(dead, (1000, 1000))
    cache = TokenCache(tmp_path)
    Spool(cache, "key").append(0, encoded[0])  # of a process with the same ID
    cache.store("key", encoded)
    assert same(cache.load("key"), encoded)
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "key.tokens"]


def test_the_key_covers_everything_that_decides_the_tokens(
    texts: Texts, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = token_key(texts.columns, tokenizer)
    first, *others = texts.passages
    changed = [
        texts._replace(passages=[first + ".", *others]),
        texts._replace(passages=[*others, first]),
        texts._replace(questions=texts.questions[:-1]),
        # The same letters, divided otherwise.
        texts._replace(passages=[first[:-1], first[-1] + others[0], *others[1:]]),
        texts._replace(passages=texts.passages[:-1], questions=[others[-1], *texts.questions]),
    ]
    assert len({key, *(token_key(each.columns, tokenizer) for each in changed)}) == 1 + len(changed)
    tokenizer("some", truncation=True, max_length=4, padding="max_length")
    assert token_key(texts.columns, tokenizer) == key, "how it was last called is no matter"
    monkeypatch.setattr(tokenizer, "split_special_tokens", True)
    assert token_key(texts.columns, tokenizer) != key


def test_tokens_are_mapped_not_read(tmp_path: Path, texts: Texts, tokenizer: Any) -> None:
    """Data that are larger than the memory can be tokenized, cached, and used."""
    cache = TokenCache(tmp_path / "cache")

    def work(ranks: Ranks) -> list[Tokens]:
        return encode_together(ranks, texts.columns, tokenizer, cache, print)

    for _ in ("encoded", "from the cache"):
        (found,) = run_threaded(1, work)
        known = places(cache.folder)
        for array in arrays(found):
            begin = array.__array_interface__["data"][0]
            assert array.size == 0 or any(begin in each for each in known)
        assert sum(each.size for each in arrays(found)) > 1000


def places(folder: Path) -> list[range]:
    """Return where the files of a folder are mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if str(folder) in line)
    return [range(*(int(each, 16) for each in span)) for span in spans]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_tokenize_together_and_once(
    tmp_path: Path,
    texts: Texts,
    tokenizer: Any,
    encoded: Encoded,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(ranks: Ranks) -> list[Tokens]:
        here.node = f"node{ranks.rank // 2}"
        cache = NodeCache(tmp_path / here.node)
        return encode_together(ranks, texts.columns, tokenizer, cache, notes.append)

    class NodeCache(TokenCache):
        def take(self, folder: Path, key: str) -> None:
            stored.append(here.node)
            super().take(folder, key)

    here, stored, notes = threading.local(), list[str](), list[str]()
    monkeypatch.setattr("jobs.worker.data.token_cache.BLOCK", 500)  # several of each column
    monkeypatch.setattr("socket.gethostname", lambda: here.node)
    assert all(same(found, encoded) for found in run_threaded(size, work))
    assert sorted(stored) == [f"node{number}" for number in range(-(-size // 2))]
    shutil.rmtree(tmp_path / "node0")  # all ranks make again what one node lacks
    assert all(same(found, encoded) for found in run_threaded(size, work))
    monkeypatch.setattr("jobs.worker.data.token_cache.encode", None)  # nobody tokenizes again
    assert all(same(found, encoded) for found in run_threaded(size, work))
    assert notes == []


def test_an_unwritable_cache_of_any_node_is_a_note_not_a_failure(
    tmp_path: Path,
    texts: Texts,
    tokenizer: Any,
    encoded: Encoded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "node1").write_text("not a folder")
    here, notes = threading.local(), list[str]()
    monkeypatch.setattr("socket.gethostname", lambda: here.node)

    def work(ranks: Ranks) -> tuple[list[Tokens], Any]:
        here.node = f"node{ranks.rank}"
        cache = TokenCache(tmp_path / here.node / "cache")
        note: Any = notes.append if ranks.first else Mock()  # only rank 0's are printed
        found = encode_together(ranks, texts.columns, tokenizer, cache, note)
        once = compute_once(ranks, cache, "key", lambda: np.eye(2, dtype=np.float32), note)
        return found, once

    for found, once in run_threaded(2, work):
        assert same(found, encoded)
        assert np.array_equal(once, np.eye(2))
    assert [each.partition(": ")[0] for each in notes] == [
        "tokens were not cached for the next job",
        "not kept, so a run that starts again computes it again",
    ]
    assert all("Not a directory: " in each for each in notes)


TEXTS = ["tile registers", "eight cores", "which tile"]


def samples(tokenizer: Any, texts: list[str], targets: Any) -> TextSamples:
    template = read_template(tokenizer, pair=False)
    return TextSamples(encode([Column(texts, offsets=True)], tokenizer), template, targets, 32)


@pytest.mark.parametrize(
    ("targets", "other"),
    [
        (np.array([0, 1, 1]), np.array([0, 1, 0])),
        ([[0, 1], [], [1]], [[0, 1], [1], []]),
        ([np.array([0, -100]), np.array([1]), np.array([2])], [np.array([0, -100])] * 3),
        (range(3), range(1, 4)),
    ],
)
def test_a_digest_is_of_texts_targets_and_their_order(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, targets: Any, other: Any
) -> None:
    # Ten million samples would take minutes, while other ranks wait.
    monkeypatch.delattr(TextSamples, "__getitem__")
    one = samples(tokenizer, TEXTS, targets)
    assert one.digest() == samples(tokenizer, [*TEXTS], targets).digest()
    changed = [
        samples(tokenizer, TEXTS, other),
        samples(tokenizer, TEXTS[::-1], targets),
        samples(tokenizer, ["tile", "registers eight cores", "which tile"], targets),
        replace(one, max_length=16),
        replace(one, template=read_template(tokenizer, pair=True)),
    ]
    assert len({one.digest(), *(each.digest() for each in changed)}) == 6


def test_a_digest_of_windows_is_of_texts_and_answers(
    questions: list[Question], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Features, "__getitem__")
    one = build_features(questions[:8], tokenizer, 384, 128)
    assert one.digest() == build_features(questions[:8], tokenizer, 384, 128).digest()
    answer = questions[0].answers[0]
    moved = replace(questions[0], answers=(replace(answer, text=answer.text.split()[0]),))
    assert moved != questions[0]
    changed = [[moved, *questions[1:8]], questions[7::-1], questions[:7]]
    digests = {build_features(each, tokenizer, 384, 128).digest() for each in changed}
    assert len(digests - {one.digest()}) == 3
