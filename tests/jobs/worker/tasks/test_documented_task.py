"""The task of CONTRIBUTING.md, as it is there: it trains on two ranks, resumes, and says what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.worker.training.test_run import run_ranks

DOCUMENT = Path(__file__).parents[4] / "CONTRIBUTING.md"
TABLE = """
from .rate import Rate

TASKS["rate"] = Rate
"""


def run(node: Path, options: dict[str, Any], *words: str, ranks: int = 2) -> str:
    """Run the ranks on a node; return what the first one printed."""
    argv = ["-m", "worker.tasks", "rate", json.dumps(options), *words]
    return run_ranks(node, [argv] * ranks)[0].output


@pytest.mark.usefixtures("node_environ")
def test_the_documented_task_trains_and_resumes(node: Path) -> None:
    (code,) = re.findall(r"```python\n(\"\"\"Ratings.*?)```", DOCUMENT.read_text(), re.S)
    tasks = node / "code" / "worker" / "tasks"
    (tasks / "rate.py").write_text(code)
    with (tasks / "__init__.py").open("a") as file:
        file.write(TABLE)
    rows = [f"{'good ' * n}bad,{n}" for n in range(5)] * 4
    (node / "a.csv").write_text("\n".join(["text,rating", *rows]))
    options: dict[str, Any] = {"data": "a.csv", "model": "scratch", "dtype": "fp32"}
    options |= {"compile": "off", "batch_size": 5, "learning_rate": 0.006, "token_cache": "none"}
    options |= {"checkpoint_every": 10, "output": "one"}

    first = run(node, {**options, "epochs": 10})
    again = run(node, {**options, "epochs": 15}, "--resume")

    assert (node / "one" / "results.json").is_file(), first + again
    result = json.loads((node / "one" / "results.json").read_text())
    assert result["resumed_after"] == [20]
    assert "resumed with --epochs 15 (it was 10): results will differ" in again
    assert result["scores"]["error"] < 1.0, "the mean of all scores is off by 1.2"

    (node / "a.csv").write_text("text,rating\ngood,many\n")
    refused = run(node, {**options, "output": "bad"}, ranks=1)
    assert "a.csv: line 2: column 'rating' is no number" in refused
