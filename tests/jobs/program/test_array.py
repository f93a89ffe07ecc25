"""``run --array``: which elements it names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.cli.run import build_request
from jobs.program.array import parse_indexes, read_array
from jobs.program.plan import plan_program
from jobs.worker.array.plan import ARRAY, ArrayPlan, parse_array
from provision.stacks.load import load_stack
from tests.jobs.context import parse_request

PROGRAM = ("python", "work.py")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("3,17,5-6", [3, 5, 6, 17]),
        ("0-10:5,5", [0, 5, 10]),
        ("007", [7]),
    ],
)
def test_indexes_are_those_of_slurm(text: str, found: list[int]) -> None:
    assert parse_indexes(text) == found
    plan = read_array(f"{text}%2", Path(), PROGRAM)
    assert plan == ArrayPlan(PROGRAM, {index: {} for index in found}, 2, f"{text}%2")
    assert read_array(text, Path(), PROGRAM).limit == 0
    assert parse_array(plan.render().decode()) == plan


def test_rows_of_a_file_are_variables(tmp_path: Path) -> None:
    (tmp_path / "a.csv.d").mkdir()
    (tmp_path / "a.csv.d/my runs.csv").write_text(
        '\ufefflr,name\n1e-4,"a, ""b"""\n\n2e-4,é\n3e-4,\n'
    )
    plan = read_array("a.csv.d/my runs.csv%8", tmp_path, PROGRAM)
    assert plan.elements == {
        1: {"lr": "1e-4", "name": 'a, "b"'},
        2: {"lr": "2e-4", "name": "é"},
        3: {"lr": "3e-4", "name": ""},
    }
    assert (plan.limit, plan.file) == (8, "a.csv.d/my runs.csv")
    assert [*read_array("a.csv.d/my runs.csv:1,3%1", tmp_path, PROGRAM).elements] == [1, 3]
    assert parse_array(plan.render().decode()) == plan


def test_the_plan_is_sent_and_ranks_run_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--folder", "none", "--array", "1-3%2", "--", "hostname", "-f")
    plan = plan_program(
        build_request(parse_request("run", *words), Path("r")), load_stack("upstream")
    )
    assert (plan.module, plan.backend, plan.resumes) == ("worker.array", "gloo", True)
    assert plan.argv == ("--folder=work", "--output=output")
    sent = plan.files[ARRAY]
    assert isinstance(sent, bytes)
    assert json.loads(sent)["program"] == ["hostname", "-f"]
    assert parse_array(sent.decode()).elements == {1: {}, 2: {}, 3: {}}
    assert plan.details["elements"] == 3
    # Not that of the program alone, by which the job's time would be estimated.
    assert plan.command == ("--array", "1-3%2", "--", "hostname", "-f")
