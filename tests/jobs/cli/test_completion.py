"""Completion in a real shell: commands, options, and the names that exist on this machine."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import argcomplete
import argcomplete.finders
import pytest

from cluster.local_files import ClusterFiles
from jobs.__main__ import main
from jobs.cli import COMMANDS, SHORT_FORMS
from jobs.cli.setup.completion import SHELLS

ROOT = Path(__file__).parents[3]
# What bash does on TAB: it sets COMP_WORDS and calls the function that `complete` registered.
_PRESS_TAB = """
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
read -r -a COMP_WORDS <<< "$1"; [[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
$(complete -p spr-cluster | sed 's/.*-F \\([^ ]*\\).*/\\1/') spr-cluster
printf '%s\\n' "${COMPREPLY[@]}"
"""
# Two lines that bash itself completes: a comma and a dot are parts of a word.
_IN_BASH = {
    "spr-cluster ": {
        *(name for name, command in COMMANDS.items() if command.help),
        *SHORT_FORMS,
    },
    "spr-cluster up --instance-type c7i.metal-24xl,r7iz.metal-1": {
        "c7i.metal-24xl,r7iz.metal-16xl"
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the results of one job."""
    (tmp_path / "results/squad-20261121-120000/job").mkdir(parents=True)
    (tmp_path / "results/squad-20261121-120000/job/job.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    ClusterFiles.of("bert").remember("aws", "us-east-1")
    return tmp_path


@pytest.mark.parametrize(("line", "offered"), _IN_BASH.items())
def test_bash_offers_what_fits(
    folder: Path, line: str, offered: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = folder / "bin/spr-cluster"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m jobs "$@"\n')
    program.chmod(0o755)
    paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    assert main(["completion", "bash"]) == 0
    done = subprocess.run(
        ["bash", "--norc", "-c", capsys.readouterr().out + _PRESS_TAB, "bash", line],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    found = {word.strip() for word in done.stdout.splitlines() if word.strip()}
    assert found - {"-h", "--help", "--version"} == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("spr-cluster study squad --learn", {"--learning-rate"}),
        ("spr-cluster doctor --stack in", {"intel"}),
        ("spr-cluster doct", {"doctor"}),
        ("spr-cluster status --name ", {"bert"}),
        ("spr-cluster fetch squ", {"squad-20261121-120000"}),
        ("spr-cluster images --del", {"--delete"}),
    ],
)
def test_the_program_offers_what_fits(
    folder: Path, line: str, offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
    for name, value in {**environ, "COMP_POINT": str(len(line))}.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    # It takes this process's file 9, as its own comment says.
    monkeypatch.setattr(argcomplete.finders.CompletionFinder, "_init_debug_stream", lambda _: None)
    here = partial(argcomplete.autocomplete, exit_method=sys.exit, output_stream=out)
    monkeypatch.setattr(argcomplete, "autocomplete", here)
    with pytest.raises(SystemExit):
        main([])
    assert {word.strip() for word in out.getvalue().split("\n")} == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "spr-cluster" in capsys.readouterr().out
