"""Commands on jobs in a namespace of Kubernetes, in this process."""

from __future__ import annotations

import pytest

from tests.harness.command_line import CommandResult
from tests.jobs.cli.test_main import run
from tests.jobs.launchers.kubernetes.scenes import K8s

_ELSEWHERE = {"--namespace", "--context"}


@pytest.fixture
def k8s(capsys: pytest.CaptureFixture[str]) -> K8s:
    def act(command: str, *words: str) -> CommandResult:
        if command == "submit":
            return run(capsys, "k8s", "submit", *words)
        return run(
            capsys, command, *words, *(() if {*words} & _ELSEWHERE else ("--namespace", "ml"))
        )

    return act
