"""Completion in a real shell: commands, options, and the names that exist on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.local_files import ClusterFiles
from jobs.__main__ import main
from jobs.cli import COMMANDS

# What bash does on TAB: it sets COMP_WORDS and calls the function that `complete` registered.
_PRESS_TAB = """
eval "$({python} -m jobs completion bash)"
COMP_LINE="$1"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
read -r -a COMP_WORDS <<< "$1"; [[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$(complete -p spr-cluster | sed 's/.*-F \\([^ ]*\\).*/\\1/') spr-cluster
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the results of one job, and ``spr-cluster`` on the path."""
    (tmp_path / "results/squad-20261121-120000/job").mkdir(parents=True)
    (tmp_path / "results/squad-20261121-120000/job/job.json").write_text("{}")
    program = tmp_path / "bin/spr-cluster"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m jobs "$@"\n')
    program.chmod(0o755)
    ClusterFiles.of("bert").remember("aws", "us-east-1")
    return tmp_path


def press_tab(folder: Path, line: str) -> set[str]:
    """Return what bash offers after a line."""
    done = subprocess.run(
        ["bash", "--norc", "-c", _PRESS_TAB.format(python=sys.executable), "bash", line],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return {word.strip() for word in done.stdout.splitlines() if word.strip()}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("spr-cluster ver", {"verify"}),
        ("spr-cluster train squad --learn", {"--learning-rate"}),
        ("spr-cluster status --name ", {"bert"}),
        ("spr-cluster up --stack in", {"intel"}),
        ("spr-cluster up --instance-type r7iz.metal-1", {"r7iz.metal-16xl"}),
        (
            "spr-cluster up --instance-type c7i.metal-24xl,r7iz.metal-1",
            {"c7i.metal-24xl,r7iz.metal-16xl"},
        ),
        ("spr-cluster fetch squ", {"squad-20261121-120000"}),
        ("spr-cluster images --del", {"--delete"}),
    ],
)
def test_bash_offers_what_fits(folder: Path, line: str, offered: set[str]) -> None:
    assert press_tab(folder, line) == offered


def test_bash_offers_every_command(folder: Path) -> None:
    offered = press_tab(folder, "spr-cluster ")
    assert offered >= {name for name, command in COMMANDS.items() if command.help}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "spr-cluster" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script.encode(), check=True, timeout=60)
