"""What `make aws-check --spend` does on AWS, on the embedded cloud."""

from __future__ import annotations

import pytest

from infra.aws.clients import connect
from infra.aws.cloud import DEFAULT_REGION
from infra.local.cloud import open_local_cloud
from tests.aws_check.check import Recording
from tests.aws_check.sides import Side
from tests.aws_check.spend import Life
from tests.e2e.conftest import Baked, CommandLine
from tests.harness.command_line import CommandResult

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]


def test_two_machines_train_and_one_is_replaced_from_the_image(
    cli: CommandLine, baked: Baked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(cli.home))

    def run(*argv: str) -> CommandResult:
        done = cli.run(*argv[:-4], "--cloud", "local", check=None)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    side = Side("AWS", DEFAULT_REGION, connect(open_local_cloud(DEFAULT_REGION)), run)
    life, recording = Life(), Recording()
    assert side.command(*life.doctor.split()).code == 0

    life.live(side, recording)

    assert {command: why for command, why in recording.commands.items() if why} == {}
    assert [command.split()[0] for command in recording.commands] == [
        *("up", "status", "train", "repair", "(the", "down"),
    ]
    assert life.left(side).verdict == "same"
