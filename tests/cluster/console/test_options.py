"""Options as data: what a parser makes of a dataclass, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cluster.console.options import Request, argument, option, options_of, positive_int, switch
from cluster.console.parser import Parser
from infra.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PaintRequest(Request):
    """One option of each kind."""

    color: str = argument("one of two", "red", choices=("red", "blue"))
    coats: tuple[int, ...] = argument(
        "thickness", (), takes="*", parse=positive_int, choices=(1, 2)
    )
    frame: bool = switch("paint the frame")
    gold: bool = switch("in gold", needs="--frame")
    width: int | None = option("of the frame", parse=positive_int, needs="--frame")


def parse(*words: str) -> Any:
    parser = Parser("paint")
    parser.request = PaintRequest
    parser.add(options_of(PaintRequest))
    return parser.parse(words)[1]


@pytest.mark.parametrize(
    ("words", "color", "coats"),
    [((), "red", ()), (("blue",), "blue", ()), (("blue", "2", "1"), "blue", (2, 1))],
)
def test_optional_arguments_may_have_choices(
    words: tuple[str, ...], color: str, coats: tuple[int, ...]
) -> None:
    found = parse(*words)

    assert (found.color, found.coats) == (color, coats)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("green", "argument color: invalid choice: 'green' (choose from 'red', 'blue')"),
        ("--gold", "--gold requires --frame"),
        ("--width 3", "--width requires --frame"),
        ("--frame --no-frame --gold", "--gold requires --frame"),
    ],
)
def test_what_would_have_no_effect_is_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words.split())
    assert caught.value.message.replace("red, blue", "'red', 'blue'") == message


def test_an_option_with_the_one_that_it_needs_is_accepted() -> None:
    found = parse("--gold", "--width", "3", "--frame")

    assert (found.gold, found.width, found.frame) == (True, 3, True)
