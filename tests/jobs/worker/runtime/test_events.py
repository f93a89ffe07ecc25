from __future__ import annotations

import io

import pytest

from jobs.worker.runtime.events import PREFIX, Events, parse_event


def test_only_rank_0_prints_events_but_every_rank_its_errors() -> None:
    stream = io.StringIO()
    for rank in (0, 1):
        events = Events(rank, stream)
        events.note(f"from {rank}")
        events.error(f"of {rank}", "a hint")
    parsed = [parse_event(line) for line in stream.getvalue().splitlines()]
    result = [(event["event"], event.get("text") or event["message"]) for event in parsed if event]
    assert result == [("note", "from 0"), ("error", "of 0"), ("error", "of 1")]
    assert parsed[-1] is not None
    assert (parsed[-1]["rank"], parsed[-1]["hint"], parsed[-1]["lost_peer"]) == (1, "a hint", False)


def test_step_events_are_limited_but_include_the_last() -> None:
    stream = io.StringIO()
    ticks = iter(step / 10 for step in range(1, 100))
    events = Events(0, stream, clock=lambda: next(ticks))
    for step in range(1, 12):
        events.step(step, 11, loss=1.0)
    parsed = [parse_event(line) for line in stream.getvalue().splitlines()]
    assert [event["step"] for event in parsed if event] == [1, 4, 7, 10, 11]


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Events(0, io.StringIO()).emit("note", value=float("nan"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f'{PREFIX}{{"event": "note", "text": "x"}}\n', "x"),
        (f'another rank\'s half line {PREFIX}{{"event": "note", "text": "x"}}', "x"),
        ("ordinary log text", None),
        (f"{PREFIX}not JSON", None),
        (f'{PREFIX}{{"text": "no event"}}', None),
        (f"{PREFIX}[1]", None),
    ],
)
def test_parse_event(line: str, text: str | None) -> None:
    event = parse_event(line)
    assert (event["text"] if event else None) == text
