"""The order of what makes an image, against the embedded cloud's EC2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.ec2 import tags
from infra.errors import CloudError, ConnectionLostError
from provision.bake import begin_image
from tests.fakes import FakeHost
from tests.infra.conftest import ec2_cloud
from tests.infra.local.fakes import FakeCloud

__all__ = ["ec2_cloud"]

Answer = str | Exception | Callable[[str], str]


@dataclass
class Bakery:
    """A running machine, and everything that happens in its order."""

    cloud: FakeCloud
    instance_id: str
    seal: Answer = ""
    unseal: Answer = "unbroken\n"
    happened: list[str] = field(default_factory=list)

    @property
    def ec2(self) -> Any:
        return self.cloud.clients.ec2

    def note(self, model: Any, **_: Any) -> None:
        self.happened.append(model.name)

    def _told(self, what: str) -> Callable[[str], str]:
        def answer(command: str) -> str:
            self.happened.append(what)
            said: Answer = getattr(self, what)
            if isinstance(said, BaseException):
                raise said
            return said(command) if callable(said) else said

        return answer

    @property
    def host(self) -> FakeHost:
        patterns = [("sealing the disk", "seal"), ("sh /run/spr-cluster/unseal ", "unseal")]
        return FakeHost("node0", [(pattern, self._told(what)) for pattern, what in patterns])

    def begin(self) -> str:
        return begin_image(
            self.ec2,
            self.host,
            self.instance_id,
            "spr",
            "spr-cluster-spr-1",
            {tags.INSTALLED: "0123456789ab"},
            self.cloud.clock,
        )

    def made(self) -> tuple[list[Any], list[Any]]:
        """The images and their snapshots."""
        found = self.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
        snapshots = [s for s in found if "CreateImage" in s.get("Description", "")]
        return self.ec2.describe_images(Owners=["self"])["Images"], snapshots


@pytest.fixture
def bakery(ec2_cloud: FakeCloud) -> Iterator[Bakery]:
    bakery = Bakery(ec2_cloud, ec2_cloud.run()[0])
    events = bakery.ec2.meta.events
    events.register("provide-client-params.ec2.*", bakery.note)
    yield bakery
    events.unregister("provide-client-params.ec2.*", bakery.note)


def test_the_keys_are_sealed_until_the_disk_is_copied_and_the_image_is_tagged_clean(
    bakery: Bakery,
) -> None:
    def look(_: str) -> str:
        (image,) = bakery.made()[0]
        assert tags.SEALED not in tags.from_aws(image["Tags"]), "before its content is fixed"
        del bakery.happened[-2:]  # this very look
        return "unbroken\n"

    bakery.unseal = look

    image_id = bakery.begin()

    assert bakery.happened == ["seal", "CreateImage", "DescribeSnapshots", "unseal", "CreateTags"]
    (image,), (snapshot,) = bakery.made()
    assert (image["ImageId"], image["Name"]) == (image_id, "spr-cluster-spr-1")
    for labels in (tags.from_aws(image["Tags"]), tags.from_aws(snapshot["Tags"])):
        assert labels[tags.SEALED] == "yes"
        assert labels[tags.CLUSTER] == "spr"
        assert labels[tags.INSTALLED] == "0123456789ab"


def test_an_image_that_may_hold_keys_is_discarded(bakery: Bakery) -> None:
    bakery.unseal = "broken\n"

    with pytest.raises(CloudError, match=r"image ami-\w+ was discarded: node0 had keys again"):
        bakery.begin()

    assert "CreateTags" not in bakery.happened
    assert bakery.made() == ([], [])


@pytest.mark.parametrize("where", ["seal", "unseal"])
def test_a_connection_that_breaks_leaves_no_image(bakery: Bakery, where: str) -> None:
    setattr(bakery, where, ConnectionLostError("node0", "the connection broke"))

    with pytest.raises(ConnectionLostError):
        bakery.begin()

    assert bakery.made() == ([], [])
    # Even where the seal's own answer is lost, it may have been made.
    assert bakery.happened.count("unseal") == 1


_REFUSED = ClientError({"Error": {"Code": "UnauthorizedOperation"}}, "CreateImage")


@pytest.mark.parametrize(
    ("operation", "error", "left"),
    [
        ("CreateImage", _REFUSED, 0),
        # The snapshots of an image are known to us only from this one.
        ("DescribeSnapshots", KeyboardInterrupt(), 1),
        ("CreateTags", _REFUSED, 0),
    ],
)
def test_an_error_of_ec2_or_ctrl_c_unseals_and_leaves_no_image(
    bakery: Bakery, operation: str, error: BaseException, left: int
) -> None:
    def fail(**_: Any) -> None:
        raise error

    bakery.ec2.meta.events.register(f"before-call.ec2.{operation}", fail)
    with pytest.raises(type(error)):
        bakery.begin()
    bakery.ec2.meta.events.unregister(f"before-call.ec2.{operation}", fail)

    assert bakery.happened.count("unseal") == 1
    images, snapshots = bakery.made()
    assert (images, len(snapshots)) == ([], left)
