"""The worker's tests on this machine, as it is and as a weaker processor.

oneDNN and ATen read from the environment which instructions they may use:
https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.worker.runtime.precision import read_cpu_flags

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("onednn", "aten", "flag"),
    [("AVX2", "avx2", "avx2"), ("AVX512_CORE", "avx512", "avx512f")],
)
def test_the_workers_tests_pass_on_a_weaker_processor(onednn: str, aten: str, flag: str) -> None:
    if flag not in read_cpu_flags():
        pytest.skip(f"this processor has no {flag}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ = {**kept, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}
    ask = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    python = [sys.executable, "-c", ask]
    capability = subprocess.run(python, env=environ, capture_output=True, text=True, check=True)
    assert capability.stdout.strip() == aten.upper()

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not full and not e2e", "tests/jobs/worker"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )

    print(done.stdout[-200:])
    assert done.returncode == 0, done.stdout
