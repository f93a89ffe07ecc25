"""What a user sees while long work runs."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.console.display import (
    PlainProgress,
    TreeProgress,
    format_table,
    make_progress,
)
from cluster.console.options import Request
from cluster.console.output import ask_for, emit, wrap
from infra.cost.prices import Price
from infra.errors import DeadlineError
from jobs.cli.shared.job_display import JobDisplay, render_result, render_shares, render_step

STEP: dict[str, Any] = {
    "event": "step",
    "epoch": 1.0,
    "loss": 2.5,
    "samples_per_second": 41.0,
    "tokens_per_second": 7380.4,
    "eta_seconds": 185.0,
    "shares": {"a": 0.497, "b": 0.503},
}


def test_plain_lines_tell_beginning_notes_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress()
    with progress.phase("outer"):
        with progress.phase("inner"):
            progress.note("half way")
            progress.note("half way")
        with pytest.raises(ValueError, match="x"), progress.phase("broken"):
            raise ValueError("x")

    for error in (DeadlineError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), progress.phase("job"):
            raise error

    lines = capsys.readouterr().err.splitlines()
    assert lines[-3] == "timed out after 0.0 s: job"
    assert lines[-1] == "interrupted after 0.0 s: job", "the job itself may continue"
    assert lines[:3] == ["outer", "  inner", "    half way"]
    assert lines[3].startswith("  done in 0.0 s: inner")
    assert lines[5].startswith("  failed after 0.0 s: broken")
    assert lines[6].startswith("done in 0.0 s: outer")


def test_the_tree_shows_phases_notes_and_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = TreeProgress()
    screen = Console(file=io.StringIO(), width=60)
    with progress.phase("Cluster [bert]"):
        with progress.phase("Head node"):
            progress.note("6 min of at most 40")
        with suppress(ValueError), progress.phase("Workers"):
            raise ValueError
        with suppress(KeyboardInterrupt), progress.phase("Job"):
            raise KeyboardInterrupt
        screen.print(progress._render())

    assert isinstance(screen.file, io.StringIO)
    drawn = screen.file.getvalue().splitlines()
    assert "Cluster [bert]" in drawn[0]
    assert drawn[1].strip().startswith("✓ Head node")
    assert "6 min of at most 40" in drawn[2]
    assert drawn[3].strip().startswith("✗ Workers")
    assert drawn[4].strip().startswith("– Job")
    assert drawn[1].rstrip().endswith("0.0 s")


@pytest.mark.parametrize(("term", "kind"), [("xterm", TreeProgress), ("dumb", PlainProgress)])
def test_the_tree_is_for_terminals_that_can_redraw_it(
    term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    assert type(make_progress()) is kind


def test_the_tree_does_not_draw_over_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, drawing = TreeProgress(), list[bool]()

    def note() -> str:
        drawing.append(progress._live.is_started)
        return ""

    monkeypatch.setattr("sys.stdin.readline", note)
    with progress.phase("Remove cluster"):
        ask_for("Continue? [y/N]")
        note()
    ask_for("Continue? [y/N]")
    note()
    assert drawing == [False, True, False, False]


def test_in_plain_lines_a_job_tells_a_twentieth_or_ten_seconds_at_a_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("jobs.cli.shared.job_display.time.monotonic", lambda: now[0])
    progress = PlainProgress()
    show = JobDisplay(progress)
    with progress.phase("train"):
        for step in range(1, 1000):
            show.event({**STEP, "step": step, "total": 1000})
        result = capsys.readouterr().err
        show.event({**STEP, "step": 999, "total": 1000, "loss": 2.4})
        now[0] = 11
        show.event({**STEP, "step": 999, "total": 1000, "loss": 2.3})
        show.event({**STEP, "step": 1000, "total": 1000, "loss": 2.2})
        late = capsys.readouterr().err

    assert 19 <= result.count("step ") <= 21
    assert [f"loss 2.{n}00" in late for n in (4, 3, 2)] == [False, True, True]


def test_the_live_line_tells_speed_time_and_cost() -> None:
    assert render_step({**STEP, "step": 50, "total": 200}, Price(12.345, "")) == (
        "█████░░░░░░░░░░░░░░░ step 50/200  epoch 1.00  loss 2.500  41.0 samples/s  7,380 tokens/s  "
        "nodes 50/50 %  3 min 05 s left  $12.35 so far"
    )
    assert render_step({**STEP, "step": 1, "total": 2, "shares": {"a": 1.0}}, None).endswith(
        "7,380 tokens/s  3 min 05 s left"
    )
    assert render_shares([0.2] * 4 + [0.15]) == "nodes 15.0 to 20.0 %", "the slowest is seen"


def test_a_job_tells_who_runs_on_what_and_where_it_resumed_and_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = JobDisplay(PlainProgress())
    start = {"event": "start", "world_size": 2, "hosts": ["a", "b"], "backend": "gloo"}
    show.event({**start, "dtype": "bf16"})
    show.log("a line of [the] job")
    show.event({"event": "resumed", "step": 4, "total": 9})
    show.event({"event": "stopped", "step": 7, "total": 9, "checkpoint": "step-000007"})
    show.event({"event": "checkpoint", "step": 7, "name": "step-000007", "seconds": 0.1})
    first, *rest = capsys.readouterr().err.splitlines()
    assert "2 ranks on a, b; backend gloo, bf16" in first
    assert rest == [
        "a line of [the] job",
        "resuming after step 4 of 9",
        "stopped after step 7 of 9, saved as checkpoint step-000007",
    ]


def test_the_result_in_a_few_lines() -> None:
    result = {
        "f1": 91.26,
        "em": 80.0,
        "eval_records": 10,
        "world_size": 2,
        "ranks": [{"hostname": "b"}, {"hostname": "a"}],
        "backend": "gloo",
        "dtype": "fp32",
        "samples_per_second": 41.0,
        "tokens_per_second": 7380.0,
        "seconds": {"train": 12.0},
    }

    text = render_result(result, Path("results/squad-1"))

    assert text.startswith("F1 91.3, exact match 80.0 on 10 records\nworld size 2 on 2 hosts, ")
    assert text.endswith("results/squad-1/")


def test_a_long_line_is_wrapped_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "Resources: 2 instances (i-1, i-2); 1 key pair (spr-cluster-spr)"
    assert wrap(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert wrap(text) == "Resources: 2 instances (i-1, i-2); 1 key\n  pair (spr-cluster-spr)"


@pytest.mark.parametrize(
    "command",
    [
        "spr-cluster fetch run-20261123-104829-5mr --name bert --cloud local",
        "spr-cluster train squad --resume squad-20261123-104829-5mr --name bert --cloud local --results x",
    ],
)
def test_a_command_to_copy_is_never_broken(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    text = f"\x1b[2Jcheckpoint step-000040 is saved; to resume the job: {command}"
    lines = wrap(text).split("\n")
    assert [line.strip() for line in lines[-1:]] == [command]
    assert lines[0].startswith("checkpoint")


def test_a_command_is_never_broken_where_it_fits_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    command = "spr-cluster up --name tour --cloud local --region us-east-1"
    lines = wrap(
        f"To continue:           {command}\n  → run `aws ec2 x`, or wait until it ends; {command}"
    )
    assert [line.rstrip() for line in lines.splitlines()] == [
        "To continue:",
        f"  {command}",
        "  → run `aws ec2 x`, or wait until it ends;",
        f"    {command}",
    ]
    assert all(len(line) <= 80 for line in lines.splitlines())
    assert lines.count(command) == 2


def test_a_table_that_is_too_wide_keeps_its_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("JOB", "STATE", "CHECKPOINT"), ("squad-20261122-054912", "running", "step-000007")]
    wide = format_table(rows)
    assert wide.splitlines()[1] == "squad-20261122-054912  running  step-000007"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert format_table(rows) == wide
    monkeypatch.setenv("COLUMNS", "40")
    assert format_table(rows).splitlines() == [
        "squad-20261122-054912  STATE running",
        "  CHECKPOINT step-000007",
    ]


def test_json_does_not_render_the_text_and_an_empty_text_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit(Request(), "", {"changed": False})
    assert capsys.readouterr().out == ""
    emit(Request(json=True), lambda: str(1 / 0), {"changed": False})
    assert capsys.readouterr().out == '{"changed": false}\n'
