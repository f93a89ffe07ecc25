from __future__ import annotations

import io
import json
from typing import Any

import pytest

from jobs.worker.runtime.events import (
    MARK,
    NAMES,
    PREFIX,
    Events,
    mark_of,
    parse_event,
    render_event,
    take_mark,
)

FIGURES: dict[str, Any] = {
    **dict.fromkeys(
        ("epoch", "loss", "samples_per_second", "tokens_per_second", "eta_seconds"), 1.0
    ),
    "shares": {"a": 1.0},
}


def test_only_rank_0_prints_events_but_every_rank_its_errors() -> None:
    stream = io.StringIO()
    for rank in (0, 1):
        Events(rank, stream).note("text")
        Events(rank, stream).error("message", "a hint")
    parsed = [parse_event(line) or {} for line in stream.getvalue().splitlines()]
    assert [(each["event"], each.get("rank")) for each in parsed] == [
        ("note", None),
        ("error", 0),
        ("error", 1),
    ]


def test_events_name_the_users_files(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, own = io.StringIO(), 'my "own"/data/train.csv'
    monkeypatch.setenv(NAMES, json.dumps({"data/train.csv": own}))
    Events(0, stream).error(f"data/train.csv: line 7: is not as in {own}")
    found = parse_event(stream.getvalue())
    assert found is not None
    assert found["message"] == f"{own}: line 7: is not as in {own}"


def test_step_events_are_limited_but_include_the_last() -> None:
    stream = io.StringIO()
    ticks = iter(step / 10 for step in range(1, 100))
    events = Events(0, stream, clock=lambda: next(ticks))
    for step in range(1, 12):
        events.step(step, 11, **FIGURES)
    parsed = [parse_event(line) for line in stream.getvalue().splitlines()]
    assert [event["step"] for event in parsed if event] == [1, 4, 7, 10, 11]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f'{PREFIX}{{"event": "note", "text": "x"}}\n', "x"),
        (f'another rank\'s half line {PREFIX}{{"event": "note", "text": "x"}}', "x"),
        ("ordinary log text", None),
        (f"{PREFIX}not JSON", None),
        (f'{PREFIX}{{"text": "no event"}}', None),
        (f'{PREFIX}{{"event": "unknown"}}', None),
        (f'{PREFIX}{{"event": "note", "text": 1}}', None),
        (f'{PREFIX}{{"event": "note", "text": "x", "at": NaN}}', None),
        (f'{PREFIX}{{"event": "note", "text": "\\ud800"}}', None),
        (f'{PREFIX}{{"event": "error", "message": "m", "exit_code": "abc"}}', None),
        (f"{PREFIX}{'[' * 100_000}", None),
    ],
)
def test_parse_event(line: str, text: str | None) -> None:
    event = parse_event(line)
    assert (event["text"] if event else None) == text


@pytest.mark.parametrize(("name", "value"), [("total", 0), ("step", True), ("loss", 1e400)])
def test_a_step_that_can_not_be_shown_is_text(name: str, value: object) -> None:
    step = {"event": "step", "step": 1, "total": 2, **FIGURES}
    assert parse_event(render_event(step, "5f3a"), "5f3a") == step
    bad = "@spr 5f3a " + json.dumps({**step, name: value})
    assert parse_event(bad, "5f3a") is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        render_event({**step, "loss": float("nan")})


def test_only_the_jobs_own_mark_makes_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, mark_of("squad-1"))
    stream = io.StringIO()
    Events(0, stream, mark=take_mark()).note("x")
    assert parse_event(stream.getvalue(), mark_of("squad-1"))
    assert parse_event(stream.getvalue(), mark_of("squad-2")) is None
    assert parse_event(stream.getvalue()) is None
    assert take_mark() == "", "the programs that this process starts have none"
