"""The page about the Python API, on the embedded cloud."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Baked, CommandLine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_ROOT = Path(__file__).parents[2]


def test_the_page_does_what_it_says(cli: CommandLine, baked: Baked, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(cli.programs / "python"), "-m", "doctest", str(_ROOT / "docs" / "python-api.md")],
        env=cli.environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}\n{done.stderr}"
    (results,) = tmp_path.glob("results/digits-*/results.json")
    assert json.loads(results.read_text())["scores"]["accuracy"] > 50
    assert "demo" not in [each["cluster"] for each in cli.json("list")["clusters"]]
