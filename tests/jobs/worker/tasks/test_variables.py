"""The user's variables of a training job, which a rank reads from its job's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_libraries_find_the_users_variables_when_they_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(["OMP_DISPLAY_ENV=TRUE"]))
    argv = [
        sys.executable,
        "-m",
        "jobs.worker.tasks",
        "digits",
        '{"max_steps": 1, "backend": "gloo"}',
    ]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "OPENMP DISPLAY ENVIRONMENT BEGIN" in done.stderr
    assert (tmp_path / "output/results.json").is_file()


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{")
    argv = [sys.executable, "-m", "jobs.worker.tasks", "digits"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "environment.json can't be read" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
