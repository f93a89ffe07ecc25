"""The one way to print a result."""

from __future__ import annotations

import json

import pytest

from cluster.console.options import Request
from cluster.console.output import emit


def render_damaged() -> str:
    raise ValueError("results.json is damaged")


def test_a_result_is_printed_as_text_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Request(json=False), "Up to date", {"changed": False})
    assert capsys.readouterr().out == "Up to date\n"
    emit(Request(json=False), lambda: "Up to date", {"changed": False})
    assert capsys.readouterr().out == "Up to date\n"

    emit(Request(json=True), "Up to date", {"changed": False})
    assert json.loads(capsys.readouterr().out) == {"changed": False}


def test_without_a_text_only_json_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Request(json=False), "", {"removed": []})
    assert capsys.readouterr().out == ""


def test_a_text_that_fails_does_not_keep_the_data_back(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Request(json=True), render_damaged, {"state": "succeeded"})
    assert json.loads(capsys.readouterr().out) == {"state": "succeeded"}
