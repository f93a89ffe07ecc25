from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.runtime.errors import TrainingError
from jobs.worker.runtime.output import FLUSH_SECONDS, Metrics, StepFigures, state_folder
from tests.fakes import FakeClock


def figures(step: int) -> StepFigures:
    return StepFigures(step, step / 2, 1 / 3, 1e-4, 4, 90, 96, {"data": 1e-9, "forward": 0.25})


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (state_folder(folder) / "metrics" / "rank-3.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_figures_are_written_every_few_seconds_and_at_the_end(tmp_path: Path) -> None:
    clock = FakeClock()
    with Metrics(tmp_path, 3, print, clock.monotonic) as metrics:
        metrics.begin(0)
        metrics.add(figures(1))
        assert lines(tmp_path) == []
        clock.sleep(FLUSH_SECONDS)
        metrics.add(figures(2))
        assert len(lines(tmp_path)) == 2
        metrics.add(figures(3))
    assert lines(tmp_path)[0] == {
        "step": 1,
        "time": 0.5,
        "loss": 1 / 3,
        "lr": 1e-4,
        "samples": 4,
        "tokens": 90,
        "padded": 96,
        "seconds": {"data": 0.0, "forward": 0.25},
    }
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_disk_full_for_a_while_loses_no_line_and_no_training(tmp_path: Path) -> None:
    notes: list[str] = []
    with Metrics(tmp_path, 3, notes.append) as metrics:
        metrics.begin(0)
        metrics.add(figures(1))
        metrics.flush()
        with file_size_limit(
            (state_folder(tmp_path) / "metrics" / "rank-3.jsonl").stat().st_size + 10
        ):
            for step in (2, 3):
                metrics.add(figures(step))
                metrics.flush()
        metrics.add(figures(4))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    (warning,) = notes
    assert warning.endswith("rank-3.jsonl can't be written: File too large")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Keep this process's files from growing beyond ``size``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_that_can_not_be_written_are_reported_before_training(tmp_path: Path) -> None:
    state_folder(tmp_path).mkdir()
    (state_folder(tmp_path) / "metrics").write_text("")
    with pytest.raises(TrainingError, match=r"rank-3\.jsonl can't be written"):
        Metrics(tmp_path, 3, print).begin(0)


@pytest.mark.parametrize(("resumed", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_resumed_run_records_no_step_twice(tmp_path: Path, resumed: int, kept: list[int]) -> None:
    with Metrics(tmp_path, 3, print) as metrics:
        metrics.begin(0)
        for step in (1, 2, 3):
            metrics.add(figures(step))
    path = state_folder(tmp_path) / "metrics" / "rank-3.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "ti')

    Metrics(tmp_path, 3, print).begin(resumed)

    assert [line["step"] for line in lines(tmp_path)] == kept
