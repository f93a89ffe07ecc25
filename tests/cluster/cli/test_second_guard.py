"""`--second-guard` from the command line: offered, paid for with nothing, and allowed by its own policy."""

from __future__ import annotations

import pytest

from tests.harness.command_line import CommandLine


def test_a_plan_offers_it_and_says_what_it_costs(line: CommandLine) -> None:
    free = "(free: one of 14 million free invocations a month for each node)"

    offered = " ".join(line.must("up", "--dry-run").out.split())
    taken = " ".join(line.must("up", "--dry-run", "--second-guard").out.split())

    assert f"--second-guard lets AWS terminate it as well {free}." in offered
    assert "Second guard" not in offered
    assert f"Second guard: AWS terminates machines that do not shut down {free}." in taken
    action = "EventBridge Scheduler terminates each machine 10 min after its deadline"
    assert f"Second guard: {action} Nodes:" in taken


def test_it_can_be_cleared_and_set_again(line: CommandLine) -> None:
    up = ("up", "--name", "bert", "--yes")
    line.must(*up, "--second-guard")
    for options, shown, tag in (
        (["--no-second-guard"], "  Second guards: spr-cluster-bert\n", ""),
        ([], "", ""),
        (["--second-guard"], "  Second guard: EventBridge", "yes"),
    ):
        assert shown in line.must(*up, *options).err
        assert line.cloud.group.tags["spr-cluster:second-guard"] == tag


@pytest.mark.parametrize("option", [("--second-guard",), ("--bucket", "s3://team-b")])
def test_a_role_that_iam_does_not_see_yet_is_waited_for(
    line: CommandLine, option: tuple[str, ...]
) -> None:
    line.cloud.fake.clients.s3.create_bucket(Bucket="team-b")
    early = "code = 'NoSuchEntity'\nstatus = 404\ntimes = 2\n"
    line.cloud.faults(f"[[error]]\naction = 'PutRolePolicy'\n{early}")

    line.must("up", "--nodes", "1", *option, "--yes")
