"""The page about the Python API, on the cluster of two nodes, which it removes at its end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import TWO, LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_ROOT = Path(__file__).parents[2]


def test_the_page_does_what_it_says(two: LiveCluster, tmp_path: Path) -> None:
    page = (_ROOT / "docs/python-api.md").read_text()
    assert 'name="demo", nodes=2' in page
    (tmp_path / "page.md").write_text(page.replace('name="demo"', f'name="{TWO[1]}"'))
    done = subprocess.run(
        [str(two.cli.programs / "python"), "-m", "doctest", "page.md"],
        env=two.cli.environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}\n{done.stderr}"
    (results,) = tmp_path.glob("results/digits-*/results.json")
    assert json.loads(results.read_text())["scores"]["accuracy"] > 50
    assert TWO[1] not in [each["cluster"] for each in two.cli.json("list")["clusters"]]
