"""The job on the versions of stack `intel`: PyTorch 2.7 with transformers 4.56, and IPEX 2.7.

The oneCCL bindings are left out: only Intel's own index has them. The wheels are gigabytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from provision.stacks.load import load_stack
from tests.jobs.worker.training.test_run import TIMEOUT, rank_environs, small, squad_argv

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def intel_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the stack's packages."""
    venv = tmp_path_factory.mktemp("intel") / "venv"
    stack = load_stack("intel")
    packages = [
        p for p in stack.python_packages if not p.startswith(("oneccl", "impi", "datasets"))
    ]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=300)
    index = ["--extra-index-url", stack.indexes[0], "--retries", "1"]
    pip = [str(venv / "bin/pip"), "install", "--quiet", "--no-input", *index, *packages]
    subprocess.run(pip, check=True, timeout=3000)
    return str(venv / "bin/python")


@pytest.mark.parametrize("ipex", [False, True])
def test_two_ranks_train(nodes_folder: Path, intel_python: str, ipex: bool) -> None:
    options = replace(small(nodes_folder, "out", batch_size=4), ipex=ipex, dtype="fp32")

    argv = [intel_python, *squad_argv(options)]
    first, second = (
        subprocess.Popen(argv, cwd=nodes_folder, env=each, stdout=subprocess.PIPE, text=True)
        for each in rank_environs(2)
    )
    output, _ = first.communicate(timeout=TIMEOUT)

    assert (first.returncode, second.wait(TIMEOUT)) == (0, 0), output
    assert "@spr" in output
    results = json.loads((nodes_folder / "out" / "results.json").read_text())
    assert results["versions"]["torch"].startswith("2.7.0")
    assert results["versions"]["transformers"] == "4.56.2"
    assert results["loss_curve"][-1][1] < results["loss_curve"][0][1]
