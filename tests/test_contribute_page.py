"""CONTRIBUTING.md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
FOLDERS = ("infra", "provision", "cluster", "jobs", "spr_cluster", "tests", "docs")
CHANGED = (
    *("infra.spec", "infra.ec2.purchase", "infra.instance_types"),
    *("cluster.cli", "cluster.cli.zones", "cluster.verify.machine", "cluster.verify.verify"),
    *("jobs.worker.training.options", "jobs.worker.tasks", "jobs.worker.tasks.rate"),
    "tests.cluster.verify.test_nodes",
)
"""The modules that the recipes change; they import most of the others."""
# The tests of the option, the instance family, and the command, as their author would write them.
_TESTS = """
from tests.harness.command_line import CommandLine


def test_a_monitored_cluster_has_zones(line: CommandLine) -> None:
    line.must("up", "--nodes", "2", "--monitoring", "--instance-type", "c8in.metal-48xl", "--yes")
    sent = [each.parameters for each in line.call_log.calls if each.action == "ec2:RunInstances"]
    assert {each["Monitoring.Enabled"] for each in sent} == {"true"}
    assert line.must("zones").out == "node0  us-east-1a\\nnode1  us-east-1a\\n"
"""


def blocks(section: str) -> list[str]:
    """Return the code in a section of the page, without the indentation of its list."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?ms)^( *)```(?:python|sh|text)\n(.*?)^ *```", text)
    return [re.sub(rf"(?m)^{indent}", "", code) for indent, code in found]


def add(path: Path, code: str, *, before: str = "") -> None:
    """Put code before the first line that begins like that, or at the end."""
    text = path.read_text()
    at = text.index(f"\n{before}") + 1 if before else len(text)
    path.write_text(text[:at] + code + text[at:])


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after all recipes were followed, with nothing else changed."""
    folder = tmp_path_factory.mktemp("copy")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "e2e")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")
    cluster, tasks = folder / "cluster", folder / "jobs/worker/tasks"

    option, use = blocks("Add a cluster option")
    add(folder / "infra/spec.py", option, before="    placement_group:")
    add(folder / "infra/ec2/purchase.py", use, before="    if offer.in_group:")

    options = folder / "jobs/worker/training/options.py"
    change(options, "batch_size: int = option(16,", "batch_size: int = option(24,")

    (row,) = blocks("Add an instance family")
    types = folder / "infra/instance_types.py"
    add(types, row, before='    _flex("c7i-flex"')

    (commands,) = blocks("Add a stack")
    subprocess.run(["sh", "-ec", commands], cwd=folder, check=True)

    check, row, defect = blocks("Add a check to verify")
    add(cluster / "verify/machine.py", f"\n\n{check}")
    add(cluster / "verify/verify.py", row, before="    software.check_tcmalloc,")
    add(folder / "tests/cluster/verify/test_nodes.py", defect, before='    ({"kernel"')

    command, row = blocks("Add a command")
    (cluster / "cli/zones.py").write_text(command)
    add(cluster / "cli/__init__.py", row, before='        "verify"')
    (folder / "tests/cluster/cli/test_zones.py").write_text(_TESTS)

    (task,) = blocks("Add a task")
    (tasks / "rate.py").write_text(task)
    (tasks / "rate.sample.csv").write_text("text,rating\n" + "good,1\nbad,0\n" * 20)
    add(tasks / "__init__.py", "from .rate import Rate\n", before="from .score import")
    change(tasks / "__init__.py", "(Squad,", "(Rate, Squad,")
    return folder


def run(folder: Path, *words: str, **environ: str) -> str:
    """Run Python in the copy; return what it printed."""
    argv, env = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(folder), **environ}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_copy_passes_its_tests(copy: Path) -> None:
    """`make reference` is one of them; the others name all options, stacks, or checks."""
    tests = {
        "tests/jobs/cli/test_commands_page.py": "parsers",
        "tests/cluster/cli/test_zones.py": "monitored",
        "tests/cluster/verify/test_nodes.py": "swapfile or healthy_machines",
        "tests/infra/ec2/test_cluster_record.py": "every_option",
        "tests/infra/ec2/test_offers.py": "exactly_this",
        "tests/provision/test_install.py": "shipped_stacks",
    }
    chosen = " or ".join(tests.values())
    run(copy, "-m", "pytest", "-q", *tests, "-k", chosen, UPDATE_GOLDEN="1")
    page = (copy / "docs" / "commands.md").read_text()
    assert "### spr-cluster zones\n" in page
    assert "--monitoring" in page
    assert "features per step and rank (default: 24)" in page


@pytest.mark.full
def test_the_copy_has_right_types(copy: Path) -> None:
    run(copy, "-m", "mypy", *(word for name in CHANGED for word in ("-m", name)))


def test_the_stack_and_the_task_are_known(copy: Path) -> None:
    stacks = json.loads(run(copy, "-m", "jobs", "stacks", "--json"))
    assert "newer" in {each["name"] for each in stacks}
    words = ("-m", "jobs", "train", "rate", "--to", "kubernetes-yaml", "--nodes", "2")
    for data in (("--data", "/workspace/data/reviews.csv"), ("--demo",)):
        assert "\n    - rate\n" in run(copy, *words, *data, "--stack", "newer")
