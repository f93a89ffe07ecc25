"""The pages add-a-….md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("infra", "provision", "cluster", "jobs", "tests", "docs")
# A command's test, as its author would write it.
_ZONES = """
from tests.harness.command_line import CommandLine


def test_the_zones_are_listed(line: CommandLine) -> None:
    line.must("up", "--nodes", "2", "--yes")
    assert line.must("zones").out == "node0  us-east-1a\\nnode1  us-east-1a\\n"
"""


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a language in a page, also those in lists."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"(?ms)^( *)```{language}\n(.*?)^ *```", text)
    return [textwrap.dedent(code) for _, code in found]


def add(path: Path, code: str, *, before: str = "") -> None:
    """Put code before the first line that begins like that, or at the end."""
    text = path.read_text()
    at = text.index(f"\n{before}") + 1 if before else len(text)
    path.write_text(text[:at] + code + text[at:])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after all pages were followed."""
    folder = tmp_path_factory.mktemp("copy")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "e2e")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)

    (check,) = blocks("add-a-check.md", "python")
    (defect,) = blocks("add-a-check.md", "text")
    add(folder / "cluster/verify/machine.py", f"\n\n{check}")
    verify = folder / "cluster/verify/verify.py"
    add(verify, "    machine.check_swap,\n", before="    software.check_tcmalloc,")
    add(folder / "tests/cluster/verify/test_nodes.py", defect, before='    ({"kernel"')

    command, row = blocks("add-a-command.md", "python")
    (folder / "cluster/cli/zones.py").write_text(command)
    add(folder / "cluster/cli/__init__.py", row, before='        "verify"')
    (folder / "tests/cluster/cli/test_zones.py").write_text(_ZONES)

    (stack,) = blocks("add-a-stack.md", "toml")
    (folder / "provision/stacks/mine.toml").write_text(stack)

    (task,) = blocks("add-a-job.md", "python")
    tasks = folder / "jobs/worker/tasks"
    (tasks / "score.py").write_text(task)
    (tasks / "score.sample.csv").write_text("text,score\n" + "good,1\nbad,0\n" * 20)
    add(tasks / "__init__.py", "from .score import Score\n", before="from .squad.task")
    table = (tasks / "__init__.py").read_text().replace("(Squad,", "(Score, Squad,")
    (tasks / "__init__.py").write_text(table)
    return folder


def run(folder: Path, *words: str, **environ: str) -> str:
    """Run Python in the copy; return what it printed."""
    argv, env = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(folder), **environ}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_check_and_the_command_pass_their_tests(copy: Path) -> None:
    """`make reference` is one of them."""
    tests = (
        "tests/cluster/verify/test_nodes.py",
        "tests/cluster/cli/test_zones.py",
        "tests/jobs/cli/test_commands_page.py",
    )
    chosen = ("-k", "swapfile or healthy or zones or parsers")
    shown = run(copy, "-m", "pytest", "-v", *tests, *chosen, UPDATE_GOLDEN="1")
    assert "### spr-cluster zones\n" in (copy / "docs" / "commands.md").read_text()
    assert "4 passed" in shown


def test_the_stack_and_the_task_are_known(copy: Path) -> None:
    assert "mine" in {
        each["name"] for each in json.loads(run(copy, "-m", "jobs", "stacks", "--json"))
    }
    words = ("-m", "jobs", "train", "score", "--to", "kubernetes-yaml", "--nodes", "2")
    for data in (("--data", "/workspace/data/reviews.csv"), ("--demo",)):
        assert "\n    - score\n" in run(copy, *words, *data, "--stack", "mine")
