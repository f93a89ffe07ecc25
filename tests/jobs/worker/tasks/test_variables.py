"""The files in a training job's folder that a rank reads before it loads a library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_libraries_find_the_users_variables_and_packages_hide_none(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(["OMP_DISPLAY_ENV=TRUE"]))
    # Stands for a client that was installed beside the stack, and must not hide what the stack has.
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/torch.py").write_text("raise RuntimeError('not the stack')")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jobs.worker.tasks",
            "digits",
            '{"backend": "gloo", "max_steps": 1}',
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OPENMP DISPLAY ENVIRONMENT BEGIN" in done.stderr
