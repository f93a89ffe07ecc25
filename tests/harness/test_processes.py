"""The searches for a job's processes: they find what the product starts, and fail if it is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.forked import Forked
from tests.harness.processes import JobProcesses

_ROOT = Path(__file__).parents[2]
# A module of ours in a pattern for pgrep, such as [w]orker[.]tasks.
_MODULE = re.compile(r"\[w\]orker\[\.\]([a-z_]+)")
# A job's command lines: the words of its ranks, by module.
_SLEEP = "import time; time.sleep(60)"


def test_no_pattern_names_a_module_that_was_renamed() -> None:
    files = [*(_ROOT / "tests").rglob("*.py"), *(_ROOT / "benchmarks").rglob("*.py")]
    found = {
        (path.name, name) for path in files for name in _MODULE.findall(path.read_text("utf-8"))
    }
    assert {name for _, name in found} >= {"tasks", "supervisor", "program"}
    gone = [(file, name) for file, name in found if not (_ROOT / "jobs/worker" / name).exists()]
    assert not gone


def shell(_node: str, command: str) -> str:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, command
    return done.stdout


def test_absence_is_proved_only_after_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = "worker.tasks-of-this-test"
    monkeypatch.setattr(
        "tests.harness.processes._PRESENT", "pgrep -f '[w]orker.tasks-of-this-test'"
    )
    monkeypatch.setattr(
        "tests.harness.processes._LEFT", "pgrep -af '[w]orker.tasks-of-this-test' || true"
    )
    with pytest.raises(AssertionError):
        JobProcesses.find(shell, ["node0"])
    with subprocess.Popen([sys.executable, "-c", _SLEEP, mark]) as rank:
        try:
            found = JobProcesses.find(shell, ["node0"])
            with pytest.raises(AssertionError, match=mark):
                found.require_gone()
        finally:
            rank.kill()
    found.require_gone()


def test_a_forked_process_is_like_any_other(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), sys.argv[1], input(), os.environ); sys.exit(3)"
    (tmp_path / "given").write_text("line\n")
    done = Forked(["-c", code, "word"], tmp_path, {"ONE": "1"}, tmp_path / "given").finish(60)
    assert done == (3, f"{tmp_path} word line environ({{'ONE': '1'}})\n")

    status, said = Forked(["-m", "json.tool", "nowhere"]).finish(60)
    assert status == 2
    assert "No such file or directory: 'nowhere'" in said
    assert Forked(["-c", _SLEEP]).finish(timeout=0.1) == (-9, "")
