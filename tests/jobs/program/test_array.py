"""``run --array``: which elements it names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.cli.run import build_request
from jobs.program.array import MOST_ELEMENTS, parse_indexes, read_array
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
    (tmp_path / "my runs.csv").write_text('\ufefflr,name\n1e-4,"a, ""b"""\n\n2e-4,é\n3e-4,\n')
    plan = read_array("my runs.csv%8", tmp_path, PROGRAM)
    assert plan.elements == {
        1: {"lr": "1e-4", "name": 'a, "b"'},
        2: {"lr": "2e-4", "name": "é"},
        3: {"lr": "3e-4", "name": ""},
    }
    assert (plan.limit, plan.source) == (8, "my runs.csv:")
    assert [*read_array("my runs.csv:1,3%1", tmp_path, PROGRAM).elements] == [1, 3]
    assert parse_array(plan.render().decode()) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--array : expected indexes or a CSV file"),
        ("1-", "--array 1-: expected indexes or a CSV file"),
        ("1-5%0", "--array 1-5%0: expected indexes or a CSV file"),
        ("5-1", "--array 5-1: 5-1: expected FIRST-LAST or FIRST-LAST:STEP"),
        ("1-5:0", "--array 1-5:0: 1-5:0: expected FIRST-LAST or FIRST-LAST:STEP"),
        ("1-999999999", f"--array 1-999999999: 10,001 elements, expected 1 to {MOST_ELEMENTS:,}"),
        ("none.csv", "none.csv"),
        ("a.csv:3", "--array a.csv:3: there is no row 3, only 1 to 2"),
        ("bare.csv", "--array bare.csv: 0 elements, expected 1 to 10,000"),
        ("empty.csv", "--array empty.csv: it is empty"),
        ("short.csv", "--array short.csv: line 3 has 1 values for 2 columns"),
        ("name.csv", "--array name.csv: column 'learning rate' is not the name of a variable"),
        ("ours.csv", "--array ours.csv: column RANK: the placement sets it for each rank"),
        ("index.csv", "--array index.csv: column SPR_ARRAY_INDEX: the placement sets it"),
        ("twice.csv", "--array twice.csv: there are two columns lr"),
        ("quote.csv", "--array quote.csv: line 2: unexpected end of data"),
        ("null.csv", "--array null.csv: line 2 has a null character"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    files = {
        "a": "lr\n1\n2\n",
        "bare": "lr\n",
        "empty": "",
        "short": "lr,seed\n1,2\n3\n",
        "name": "learning rate\n1\n",
        "ours": "RANK\n1\n",
        "index": "SPR_ARRAY_INDEX\n1\n",
        "twice": "lr,lr\n1,2\n",
        "quote": 'lr\n"1\n',
        "null": "lr\na\0b\n",
    }
    for name, content in files.items():
        (tmp_path / f"{name}.csv").write_text(content)
    with pytest.raises(UsageError) as caught:
        read_array(text, tmp_path, PROGRAM)
    assert message in str(caught.value)


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


@pytest.mark.parametrize(
    ("more", "flags"),
    [
        (("--pty",), "--pty"),
        (("--output-dir=out", "--backend=ccl"), "--output-dir and --backend"),
    ],
)
def test_options_without_effect_are_refused(more: tuple[str, ...], flags: str) -> None:
    request = parse_request("run", "--array=1-3", *more, "--", "hostname")
    with pytest.raises(UsageError, match=f"--array runs separate programs: omit {flags}$"):
        build_request(request, Path("r"))
