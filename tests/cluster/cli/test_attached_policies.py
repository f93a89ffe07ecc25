"""`down` in an account whose automation attaches policies to every role, at any moment."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.cli.test_iam_policy import attach_foreign_policy
from tests.harness.command_line import ApiCall, CommandLine

ROLES = {"spr-cluster-spr-us-east-1-s3", "spr-cluster-spr-us-east-1-end"}
UP = ("up", "--nodes", "1", "--bucket", "s3://team-b", "--second-guard", "--yes")


def test_the_rest_is_removed_and_the_role_tried_again(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lifecycle.down.TERMINATE_DEADLINE_S", 20)
    line.cloud.fake.clients.s3.create_bucket(Bucket="team-b")
    line.must(*UP)
    tries: Counter[str] = Counter()
    attached = 10_000  # as often as the tool tries, and longer

    def attach(call: ApiCall) -> None:
        if call.action == "iam:DeleteRole":
            role = call.parameters["RoleName"]
            tries[role] += 1
            if tries[role] <= attached:
                attach_foreign_policy(role)

    line.call_log.before.append(attach)
    line.cloud.clock.pace = 5
    result = line.run("down", "--yes")

    assert tries.keys() == ROLES
    assert result.code == 1
    assert "DeleteConflict" in result.message
    assert min(tries.values()) > 2
    assert {*line.cloud.left()} >= ROLES
    assert not line.cloud.found()  # in EC2
    # A later one finds them without anything else, and the name is free.
    line.must(*UP)
    attached = 2
    tries.clear()
    line.must("down", "--yes")
    assert tries == dict.fromkeys(ROLES, attached + 1)
    assert line.cloud.left() == []
