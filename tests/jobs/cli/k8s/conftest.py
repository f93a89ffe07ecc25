"""The subcommands of ``spr-cluster k8s`` in this process."""

from __future__ import annotations

from functools import partial

import pytest

from tests.jobs.cli.test_main import run
from tests.jobs.launchers.kubernetes.scenes import K8s


@pytest.fixture
def k8s(capsys: pytest.CaptureFixture[str]) -> K8s:
    return partial(run, capsys, "k8s")
