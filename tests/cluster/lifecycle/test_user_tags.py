"""``--tag``: on every resource from the call that creates it, recorded, and checked first."""

from __future__ import annotations

import pytest

from infra.errors import UsageError
from infra.project_file import ProjectFile
from infra.spec import parse_labels
from jobs.cli import build_parser
from jobs.cli.shared.project_options import apply_project
from tests.harness.simulated_cloud import SimulatedCloud

TAGS = (("cost-center", "ml 42"), ("team", "nlp"))


def test_every_resource_has_them_and_later_ones_too(cloud: SimulatedCloud) -> None:
    cloud.up(nodes=2, market="spot", labels=TAGS, second_guard=True)
    first = {instance.id for instance in cloud.found("instances").instances}
    # Another command, which reads them in the record.
    cloud.ctx.clients.labels = {}
    cloud.up(nodes=3)

    tagged = cloud.ec2.describe_tags(Filters=[{"Name": "key", "Values": ["team"]}])["Tags"]
    kinds = {tag["ResourceType"] for tag in tagged}
    assert {"instance", "volume", "security-group", "key-pair", "spot-instances-request"} <= kinds
    assert {"placement-group", "network-interface", "image", "snapshot"} <= kinds
    instances = {tag["ResourceId"] for tag in tagged if tag["ResourceType"] == "instance"}
    assert len(instances - first) == 1
    clients = cloud.ctx.clients
    (role,) = clients.iam.list_roles()["Roles"]
    assert {"Key": "team", "Value": "nlp"} in clients.iam.list_role_tags(RoleName=role["RoleName"])[
        "Tags"
    ]
    (group,) = [
        g for g in clients.scheduler.list_schedule_groups()["ScheduleGroups"] if "spr" in g["Name"]
    ]
    listed = clients.scheduler.list_tags_for_resource(ResourceArn=group["Arn"])["Tags"]
    assert {"Key": "cost-center", "Value": "ml 42"} in listed
    # They can't change.
    assert cloud.plan_input(labels=TAGS[1:]).spec.labels == TAGS
    with pytest.raises(UsageError, match=r"--tag team=vision: cluster .* was created with cost-"):
        cloud.plan_input(labels=(("team", "vision"),))


def test_the_project_file_has_a_table_of_them() -> None:
    project = ProjectFile(content={"cluster": {"tags": {"team": "nlp", "cost-center": "ml 42"}}})

    words = apply_project(["up"], project).words

    _, request = build_parser("up").parse(words)
    assert parse_labels(request.given["labels"]) == TAGS
