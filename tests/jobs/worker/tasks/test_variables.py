"""The files in a training job's folder that a rank reads before it loads a library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    given = json.dumps({"backend": "gloo", **options})
    return subprocess.run(
        [sys.executable, "-m", "jobs.worker.tasks", "digits", given],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_libraries_find_the_users_variables_and_packages_hide_none(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(["OMP_DISPLAY_ENV=TRUE"]))
    # Stands for a client that was installed beside the stack, and must not hide what the stack has.
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/torch.py").write_text("raise RuntimeError('not the stack')")
    done = run(tmp_path, max_steps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OPENMP DISPLAY ENVIRONMENT BEGIN" in done.stderr


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "environment.json can't be read" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
