"""EC2's state, stored by moto, with a container behind every instance and a disk behind every AMI.

The methods override moto's. They delegate to objects that also control the containers, reject what EC2
rejects, and correct moto where it differs from EC2. The server's single lock protects all calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any, ClassVar

from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instances import Instance
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, EC2_RESOURCE_TO_PREFIX, get_prefix

from infra.local.api import refusals, responses
from infra.local.api.images import LocalImages
from infra.local.api.instances import InstanceContainers
from infra.local.api.launches import Launches
from infra.local.api.lifecycle import InstanceLifecycle
from infra.local.api.network import PlacementGroups, SecurityGroups
from infra.local.api.requests import READS
from infra.local.api.runtime import Runtime
from infra.local.api.spot_requests import SpotRequests
from infra.local.machines.host import choose_range, used_ranges

# moto's DescribeTags derives a resource's kind from its id's prefix.
for _kind, _prefix in (("placement-group", "pg"), ("spot-instances-request", "sir")):
    EC2_RESOURCE_TO_PREFIX[_kind] = _prefix
    EC2_PREFIX_TO_RESOURCE[_prefix] = _kind


_PLAIN_ATTACHMENT: Any = vars(NetworkInterface)["attachment"]


def _attachment_of(interface: Any) -> Any:
    """Add the launch's ENA Express settings to moto's attachment, as DescribeInstances returns them."""
    attachment = _PLAIN_ATTACHMENT.fget(interface)
    if attachment is not None:
        attachment.ena_srd_specification = getattr(interface, "ena_srd_specification", None)
    return attachment


def hide_invented_addresses() -> None:
    """Make moto report a node's private address as its public one.

    moto invents public addresses, which belong to strangers, so no response may contain one.
    """

    def show_private_address(interface: Any) -> None:
        if str(interface.public_ip_auto_assign).lower() == "true":
            interface.public_ip = interface.private_ip_address

    NetworkInterface.check_auto_public_ip = show_private_address
    NetworkInterface.attachment = property(_attachment_of)
    # In public DNS, moto's invented name belongs to a stranger's machine.
    Instance.public_dns_name = property(lambda _instance: "")


def place_of(account: str, region: str) -> str:
    """Return the name of an account's region, so that accounts have separate container networks."""
    return region if account == DEFAULT_ACCOUNT_ID else f"{account}-{region}"


class LocalEC2Backend(EC2Backend):
    """One region's EC2. All attributes except ``runtime`` are saved and outlive the server."""

    # Tests replace these parts by stricter ones.
    lifecycle_type: ClassVar[type[InstanceLifecycle]] = InstanceLifecycle
    instances_type: ClassVar[type[InstanceContainers]] = InstanceContainers
    launches_type: ClassVar[type[Launches]] = Launches

    def __init__(self, region_name: str, account_id: str, *, runtime: Runtime) -> None:
        self.runtime = runtime
        self.place = place_of(account_id, region_name)
        with runtime.containers.changing_networks():
            self.vpc_range = choose_range([*used_ranges(), *runtime.containers.network_ranges()])
            runtime.containers.ensure_network(self.place, self.vpc_range)
        self.security_groups = SecurityGroups(self)
        self.placement_groups = PlacementGroups(self)
        self.spot_requests = SpotRequests(self)
        self.images = LocalImages(self)
        self.lifecycle = self.lifecycle_type(self)
        self.instances = self.instances_type(self)
        self.launches = self.launches_type(self)
        super().__init__(region_name, account_id)
        self.images.offer_base_image()

    # moto looks for the API's URLs next to the backend's module; this redirects it to our responses.
    _url_module: ModuleType = responses

    # The server

    def resume(self, runtime: Runtime, *, suspended: Collection[str]) -> None:
        """Continue from the saved state. ``local stop`` has stopped the ``suspended`` containers."""
        self.runtime.attach(runtime)
        runtime.containers.ensure_network(self.place, self.vpc_range)
        self.instances.resume(suspended=suspended)
        self.images.resume()
        self.lifecycle.refresh_pids()

    def reconcile(self) -> bool:
        """Apply changes that no API call made; return whether the state changed."""
        changed = (
            self.lifecycle.pass_time() | self.images.finish_copies() | self.instances.forget_ended()
        )
        return changed | self.instances.follow_containers()

    def live_instances(self) -> list[Instance]:
        """Return the instances that are not terminated."""
        return [i for i in self.all_instances() if i.state != "terminated"]

    def resources(self) -> dict[str, Any]:
        """Return all user-created resources by id."""
        collections = (
            *(self.amis, self.snapshots, *self.groups.values(), self.key_pairs, self.volumes),
            *(self.placement_groups.by_name, self.spot_instance_requests, self.enis),
            *(self.launch_templates, {i.id: i for i in self.all_instances()}),
        )
        return {r.id: r for collection in collections for r in collection.values()}

    @contextmanager
    def observe(self, action: str) -> Iterator[None]:
        """Forget the tags of what a call deletes."""
        before = set() if action.startswith(READS) else set(self.resources())
        yield
        for id_ in before and before - self.resources().keys():
            self.tags.pop(id_, None)

    def require_profile(self, name: str) -> None:
        refusals.require_profile(self, name)

    def forget_instance(self, instance_id: str) -> None:
        """Delete all data about an instance, except its reservation."""
        self.lifecycle.forget(instance_id)
        self.spot_requests.forget(instance_id)
        self.tags.pop(instance_id, None)

    # The default VPC

    def create_default_vpc(self) -> Any:
        vpc = self.create_vpc(cidr_block=str(self.vpc_range), is_default=True)
        for zone in self.describe_availability_zones():
            subnet = self.create_default_subnet(zone.name)
            # moto forgets after a restart that these are reserved and would assign them; the first of
            # them is the gateway.
            subnet._reserved_ips.update(subnet.aws_reserved_ips)
        return vpc

    def allocate_address(self, *_: Any, **__: Any) -> Any:
        raise EC2ClientError(
            "AddressLimitExceeded",
            "The embedded cloud has no public addresses: use the instance's private address",
        )

    # moto's methods, most of them answered by the parts

    def run_instances(
        self,
        image_id: str,
        count: int,
        user_data: Any,
        security_group_names: list[str],
        **arguments: Any,
    ) -> Any:
        return self.launches.run(image_id, count, user_data, security_group_names, arguments)

    def associate_iam_instance_profile(self, *_: Any, **__: Any) -> None:
        """Do nothing: :class:`.Launches` knows all instances' profiles; moto would only note the first's."""

    start_instances: Any = property(attrgetter("instances.start"))
    stop_instances: Any = property(attrgetter("instances.stop"))
    terminate_instances: Any = property(attrgetter("instances.terminate"))
    create_image: Any = property(attrgetter("images.create"))
    deregister_image: Any = property(attrgetter("images.deregister"))
    describe_snapshots: Any = property(attrgetter("images.describe_snapshots"))
    delete_snapshot: Any = property(attrgetter("images.delete_snapshot"))
    describe_spot_instance_requests: Any = property(attrgetter("spot_requests.describe"))
    cancel_spot_instance_requests: Any = property(attrgetter("spot_requests.cancel"))
    delete_security_group: Any = property(attrgetter("security_groups.delete"))
    revoke_security_group_ingress: Any = property(attrgetter("security_groups.revoke_ingress"))

    def describe_tags(self, filters: dict[str, list[str]] | None = None) -> Any:
        """Return tags of resources. For plain ids, skip moto's slow pattern matching over all tags."""
        ids = (filters or {}).get("resource-id", [])
        is_by_id = filters and filters.keys() == {"resource-id"}
        if not is_by_id or any(set("*?[") & set(i) for i in ids):
            return super().describe_tags(filters)
        return [
            {
                "resource_id": id_,
                "key": key,
                "value": value,
                "resource_type": EC2_PREFIX_TO_RESOURCE.get(get_prefix(id_), ""),
            }
            for id_ in ids
            for key, value in self.tags.get(id_, {}).items()
        ]

    def _load_amis(self) -> None:
        """Skip moto's 1,300 AMIs, because no container could start from them."""
