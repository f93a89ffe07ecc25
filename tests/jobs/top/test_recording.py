"""Recorded snapshots, played one per interval."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.top.live import Recording
from tests.fakes import FakeClock
from tests.jobs.top.samples import make_node, make_snapshot


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "record.jsonl"
    lines = [make_snapshot([make_node(0)], usd=float(usd)).as_json() for usd in range(3)]
    path.write_text("\n\n".join(lines) + "\n")
    return path


def test_it_plays_by_the_clock_and_stays_at_its_end(file: Path) -> None:
    clock = FakeClock()
    recording = Recording(file, 2.0, clock.monotonic)

    seen = []
    for _ in range(8):
        snapshot, notice = recording.latest()
        assert snapshot
        seen.append(snapshot.usd)
        assert notice == ""
        clock.sleep(1)
    assert seen == [0, 0, 1, 1, 2, 2, 2, 2]
    assert recording.last().usd == 2
    assert Recording(file, 1.0).last().usd == 2


def test_files_that_are_no_recording_are_refused(file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(UsageError, match="has no snapshot"):
        Recording(empty, 1.0).latest()

    with file.open("a") as lines:
        lines.write('{"time": 1}\n')
    with pytest.raises(UsageError, match=r"record.jsonl, line 6: nodes: Field required"):
        Recording(file, 1.0).last()
    with pytest.raises(UsageError, match="No such file"):
        Recording(tmp_path / "missing", 1.0).last()
