"""Images: Ubuntu's parameter, the fitness of our own, and the wait for them."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from infra.ec2 import tags
from infra.ec2.images import (
    create_image,
    describe_cached_images,
    describe_image,
    find_ubuntu_image,
)
from infra.errors import CloudError
from infra.iam.dry_runs import try_dry
from infra.iam.policy import build_policy
from tests.aws import Recorder
from tests.infra.local.fakes import FakeCloud
from tests.infra.plan_inputs import RECIPE

LABELS = {tags.INSTALLED: RECIPE}


@pytest.mark.parametrize(("state", "found"), [("enabled", True), ("disabled", False)])
def test_an_image_that_the_account_hides_is_explained(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, state: str, found: bool
) -> None:
    ec2 = ec2_cloud.clients.ec2
    setting = {"State": state, "ManagedBy": "declarative-policy"}
    monkeypatch.setattr(ec2, "get_allowed_images_settings", lambda: setting)
    ec2_cloud.faults("[[error]]\naction = 'DescribeImages'\ncode = 'InvalidAMIID.NotFound'\n")

    with pytest.raises((CloudError, ClientError)) as caught:
        find_ubuntu_image(ec2_cloud.clients.ssm, ec2, "24.04")
    assert ("the setting Allowed AMIs hides Canonical's image" in str(caught.value)) is found
    assert ("(managed by: declarative-policy;" in str(caught.value)) is found


def test_an_image_that_the_account_hides_ends_no_check_of_permissions(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = ec2_cloud.clients
    hides = {"State": "enabled"}
    monkeypatch.setattr(clients.ec2, "get_allowed_images_settings", lambda: hides)
    # Of this partition, no account of Canonical's is known.
    monkeypatch.setattr(clients.ec2.meta, "_partition", "aws-eusc")
    ec2_cloud.faults("[[error]]\naction = 'DescribeImages'\ncode = 'InvalidAMIID.NotFound'\n")

    with pytest.raises(CloudError, match="can allow the image provider Canonical"):
        find_ubuntu_image(clients.ssm, clients.ec2, "24.04")
    found = {finding.action: finding.state for finding in try_dry(clients, build_policy())}
    assert found["ec2:DescribeVpcs"] == "allowed"


def test_an_image_is_begun_without_a_reboot_and_with_its_tags(
    ec2_cloud: FakeCloud, ec2_calls: Recorder
) -> None:
    ec2, (machine,) = ec2_cloud.clients.ec2, ec2_cloud.run(1)
    image = describe_image(ec2, create_image(ec2, machine, "bert", "spr-cluster-bert-1", LABELS))

    (request,) = ec2_calls.of("CreateImage")
    assert request["NoReboot"] is True
    kinds = [listed["ResourceType"] for listed in request["TagSpecifications"]]
    assert kinds == ["image", "snapshot"]
    assert image.tags[tags.CLUSTER] == "bert"
    assert image.tags[tags.INSTALLED] == RECIPE
    # Whether it is clean is known only when its content can no longer change.
    assert tags.SEALED not in image.tags


def test_kept_images_on_all_pages_are_found(ec2_cloud: FakeCloud) -> None:
    (instance_id,) = ec2_cloud.run()
    labels = {**LABELS, tags.SEALED: "yes", tags.KEPT: "yes"}
    ec2 = ec2_cloud.clients.ec2
    made = [create_image(ec2, instance_id, "bert", f"kept-{number}", labels) for number in range(3)]
    ec2_cloud.faults("page_size = 1\n")

    found = describe_cached_images(ec2, RECIPE, 1000)

    assert sorted(image.id for image in found) == sorted(made)
