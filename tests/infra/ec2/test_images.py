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


def test_an_image_that_the_account_hides_is_explained(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, setting = ec2_cloud.clients, {"State": "enabled", "ManagedBy": "declarative-policy"}
    monkeypatch.setattr(clients.ec2, "get_allowed_images_settings", lambda: setting)
    fault = "[[error]]\naction = 'DescribeImages'\ncode = 'InvalidAMIID.NotFound'\ntimes = 9\n"
    ec2_cloud.faults(fault)

    hidden = (
        r"the setting Allowed AMIs hides Canonical's image .*\n.*{} \(managed by: declarative-p"
    )
    with pytest.raises(CloudError, match=hidden.format("099720109477")):
        find_ubuntu_image(clients.ssm, clients.ec2, "24.04")
    # Of this partition, no account of Canonical's is known.
    monkeypatch.setattr(clients.ec2.meta, "_partition", "aws-eusc")
    with pytest.raises(CloudError, match=hidden.format("Canonical")):
        find_ubuntu_image(clients.ssm, clients.ec2, "24.04")
    setting["State"] = "disabled"
    with pytest.raises(ClientError, match=r"InvalidAMIID\.NotFound"):
        find_ubuntu_image(clients.ssm, clients.ec2, "24.04")


def test_a_region_without_ubuntus_image_ends_no_check_of_permissions(ec2_cloud: FakeCloud) -> None:
    ec2_cloud.faults("[[error]]\naction = 'GetParameter'\ncode = 'ParameterNotFound'\ntimes = 9\n")

    found = {
        finding.action: finding.state for finding in try_dry(ec2_cloud.clients, build_policy())
    }
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
