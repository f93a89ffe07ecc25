"""The one way to print a result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.console.options import Request
from cluster.console.output import emit


def render_damaged() -> str:
    raise ValueError("results.json is damaged")


@pytest.mark.parametrize(
    ("json", "text", "shown"),
    [
        (False, "Up to date", "Up to date\n"),
        (False, lambda: "Up to date", "Up to date\n"),
        (False, "", ""),
        (True, "Up to date", '{"changed": false}\n'),
        (True, render_damaged, '{"changed": false}\n'),
    ],
)
def test_a_result_is_printed_as_text_or_as_json(
    capsys: pytest.CaptureFixture[str], json: bool, text: str | Callable[[], str], shown: str
) -> None:
    emit(Request(json=json), text, {"changed": False})
    assert capsys.readouterr().out == shown
