"""The end of a metrics file: steps, averages, and files that change in every way a run changes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jobs.top.metrics_tail import MetricsTail, parse_step
from tests.jobs.top.samples import write_metrics


def look(tail: MetricsTail, later: float = 0.0) -> dict[str, object]:
    tail.look(Path(tail.path).stat().st_mtime + later)
    return tail.figures()


def test_figures_are_averages_over_the_last_steps(tmp_path: Path) -> None:
    tail = MetricsTail(str(write_metrics(tmp_path, 0, 30)))

    assert look(tail, later=1.5) == {
        "step": 30,
        "loss": 2.5,
        "age_s": 1.5,
        "samples_per_second": 40.0,
        "communication": 0.2,
        "own_seconds": 0.08,
    }


def test_a_long_file_costs_no_more_than_its_end(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 0, 20_000)
    tail = MetricsTail(str(path))

    assert look(tail)["step"] == 20_000
    assert len(tail._steps) == 64
    assert tail._offset == path.stat().st_size


def test_new_lines_are_read_once_they_are_whole(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 0, 3)
    *_, last = path.read_text().splitlines()
    tail = MetricsTail(str(path))
    assert look(tail)["step"] == 3

    line = json.dumps({**json.loads(last), "step": 4}) + "\n"
    with path.open("a") as file:
        file.write(line[:20])
    assert look(tail)["step"] == 3
    with path.open("a") as file:
        file.write(line[20:])
    assert look(tail)["step"] == 4


def test_a_resumed_run_replaces_its_file(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 0, 40)
    tail = MetricsTail(str(path))
    assert look(tail)["step"] == 40

    longer = write_metrics(tmp_path / "new", 0, 50)
    lines = longer.read_text().splitlines(keepends=True)
    longer.write_text("".join(lines[:20]))
    longer.replace(path)
    assert look(tail)["step"] == 20

    with path.open("a") as file:
        file.writelines(lines[20:])
    assert look(tail)["step"] == 50

    path.write_text(lines[0])  # truncated in place
    assert look(tail)["step"] == 1


def test_slow_steps_are_averaged_over_two(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 0, 3)
    rows = [
        {**json.loads(line), "time": 60.0 * i}
        for i, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert look(MetricsTail(str(path)))["samples_per_second"] == pytest.approx(4 / 60, abs=1e-3)


def test_jobs_that_do_not_split_their_time_have_no_shares(tmp_path: Path) -> None:
    figures = look(MetricsTail(str(write_metrics(tmp_path, 0, 3, seconds={}))))

    assert figures["samples_per_second"] == 40.0
    assert "communication" not in figures
    assert "own_seconds" not in figures


def test_a_missing_file_and_damaged_lines_give_no_figures(tmp_path: Path) -> None:
    tail = MetricsTail(str(tmp_path / "rank-0.jsonl"))
    tail.look(0.0)
    assert tail.figures() == {}

    bad = ["{", "[]", "null", '{"step": 1}', "[" * 5000, '{"step": 1, "time": Infinity}']
    Path(tail.path).write_text("\n".join(bad) + "\n")
    assert look(tail) == {}
    os.unlink(tail.path)  # noqa: PTH108
    tail.look(0.0)
    assert tail.figures() == {}


def test_an_infinite_loss_is_unknown_and_other_infinite_figures_are_damage(tmp_path: Path) -> None:
    assert look(MetricsTail(str(write_metrics(tmp_path, 0, 3, loss=float("nan")))))["loss"] is None

    line = write_metrics(tmp_path, 1, 1, samples=float("inf")).read_bytes()
    with pytest.raises(ValueError, match="Infinity"):
        parse_step(line)
