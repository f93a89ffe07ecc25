"""Purchase of machines: one RunInstances call buys all of them; a refusal leads to the next offer.

For each type, offers go through the zones with the placement group, then through the zones without it; on
spot, cheaper zones come first.
If spot may fall back to on-demand, the same list follows for on-demand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from infra.aws.clients import error_code, is_invisible, is_passing, retry
from infra.ec2 import tags
from infra.ec2.instances import Instance
from infra.ec2.network import Network, TypeSupport
from infra.errors import CloudError
from infra.instance_types import INSTANCE_TYPES, is_standard
from infra.wait import CONSISTENCY_DEADLINE_S, Clock
from infra.words import counted

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

    from infra.ec2.images import Image
    from infra.ec2.reservations import Reservation
    from infra.instance_types import InstanceType
    from infra.spec import ClusterSpec

SPOT, ON_DEMAND = "spot", "on-demand"
_RESOURCES = ("instance", "volume", "network-interface")
# Codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
# A spot price belongs to a zone, with the placement group or without.
_TOO_EXPENSIVE = "SpotMaxPriceTooLow"
# The placement group's machines are still shutting down in another zone.
_GROUP_IN_USE = "InvalidPlacementGroup.InUse"
_NONE_RESERVED = "ReservationCapacityExceeded"
# Beginnings of codes, also those of machines that ended soon, where another offer or time may help.
_NO_ROOM = (
    "Insufficient",
    "SpotInstanceTermination",
    _TOO_EXPENSIVE,
    _GROUP_IN_USE,
    _NONE_RESERVED,
)
# All zones share the quota, so only another type or market can help.
_NO_QUOTA = {"VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"}
_NOT_IN_ZONE = "Unsupported"
# What a machine holds until it has ended, not only until it shuts down.
_HELD_TO_THE_END = {*_NO_QUOTA, _NONE_RESERVED, "InsufficientFreeAddressesInSubnet"}
# EC2's reasons for ending a machine that it had already sold begin with this:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_LATE = "Server."
_HINTS = {
    "VcpuLimitExceeded": "request more on-demand vCPUs (quota L-1216C47A) in the Service Quotas "
    "console, or use fewer --nodes",
    "MaxSpotInstanceCountExceeded": "request more spot vCPUs (quota L-34B43A08) in the Service "
    "Quotas console, or omit --market spot",
    _NONE_RESERVED: "use fewer --nodes or --capacity-reservation none, or wait for room: "
    "--wait-for-capacity 2h",
    _TOO_EXPENSIVE: "raise --max-price, or use --market spot-or-on-demand",
}
_NO_ROOM_HINT = (
    "try several types (--instance-type r7iz.metal-16xl,m7i.metal-24xl), another --region, or "
    "later: `up --wait-for-capacity 2h` keeps trying"
)
# EC2 remembers a token for a day or more, even if its machines have ended since.
_SPENT = {"IdempotentInstanceTerminated", "IdempotentParameterMismatch"}
_TOKENS_PER_OFFER = 50
# Newer types drop TCP connections that are idle for 350 seconds, and ranks can wait longer for each other:
# https://aws.amazon.com/blogs/networking-and-content-delivery/best-practices-for-tcp-connection-management-on-ec2/
_IDLE_TCP_S = 86_400


@dataclass(frozen=True)
class Offer:
    """One way to buy: type, zone, market, and whether in the placement group."""

    type: InstanceType
    network: Network
    market: str
    in_group: bool
    ena_express: bool = False

    @property
    def place(self) -> tuple[str, str]:
        return self.type.name, self.network.zone

    def __str__(self) -> str:
        market = ", spot" if self.market == SPOT else ""
        group = ", in the placement group" if self.in_group else ""
        return f"{self.type.name} in {self.network.zone}{market}{group}"


@dataclass(frozen=True)
class Refusal:
    """EC2's reason for refusing an offer."""

    offer: Offer
    code: str
    message: str

    @staticmethod
    def of(offer: Offer, error: ClientError) -> Refusal:
        message = str(error.response.get("Error", {}).get("Message", ""))
        return Refusal(offer, error_code(error), message)

    @property
    def hint(self) -> str:
        """What may help; "" if only other offers do."""
        if self.code in _NO_QUOTA and not is_standard([self.offer.type.name]):
            return (
                f"the family of {self.offer.type.name} has its own quota: request more vCPUs in the Service "
                "Quotas console, or use fewer --nodes"
            )
        return _HINTS.get(self.code, "")

    @staticmethod
    def after_launch(offer: Offer, reason: str) -> Refusal | None:
        """Return the refusal if EC2's ``reason`` for ending a new machine is a lack of capacity."""
        full, _, message = reason.partition(": ")
        code = full.removeprefix(_LATE)
        is_late = code != full and code.startswith(_NO_ROOM)
        return Refusal(offer, code, message) if is_late else None


class NoCapacityError(CloudError):
    """EC2 refused every offer. The message lists each offer with its reason."""

    def __init__(self, count: int, refusals: Sequence[Refusal]) -> None:
        # Without EC2's advice to try other zones, which the offers already include.
        first = [refusal.message.partition(". ")[0].rstrip(".") for refusal in refusals]
        pairs = zip(refusals, first, strict=True)
        lines = "".join(f"\n  {refusal.offer}: {refusal.code}: {why}" for refusal, why in pairs)
        hints = [refusal.hint for refusal in refusals if refusal.hint]
        where = "single zone has" if count > 1 else "zone has"
        super().__init__(
            f"no {where} capacity for {counted(count, 'machine')}; tried:{lines}",
            code=refusals[0].code if refusals else "",
            hint=hints[0] if hints else _NO_ROOM_HINT,
        )
        self.refusals = tuple(refusals)

    @property
    def may_pass(self) -> bool:
        """Whether trying later may help: for some offer, more than a quota is missing."""
        return any(refusal.code.startswith(_NO_ROOM) for refusal in self.refusals)


def list_offers(
    spec: ClusterSpec,
    support: Mapping[str, TypeSupport],
    networks: Sequence[Network],
    reservations: Sequence[Reservation] = (),
) -> tuple[Offer, ...]:
    """Return every way to buy the machines of a spec, in order of preference.

    For each type, zones with capacity reservations come first; with ``--capacity-reservation``, they are
    the only ones.
    """
    markets = [SPOT] if spec.spot else [ON_DEMAND]
    if spec.spot and spec.on_demand_allowed:
        markets.append(ON_DEMAND)
    reserved = {(each.instance_type, each.zone) for each in reservations}
    offers: list[Offer] = []
    for market in markets:
        for name in spec.instance_types:
            known = support.get(name)
            type_ = (known and known.machine) or INSTANCE_TYPES.get(name)
            if known is None or type_ is None:
                continue
            places = [network for network in networks if network.zone in known.zones]
            # Even for one node: the cluster may grow, and a running machine can't join a group.
            groups = [True, False] if spec.placement_group and known.cluster_groups else [False]
            own = [
                Offer(type_, network, market, in_group, known.ena_express)
                for in_group in groups
                for network in places
            ]
            offers += sorted(own, key=lambda offer: offer.place not in reserved)
    if spec.capacity_reservation:
        offers = [offer for offer in offers if offer.place in reserved]
    return tuple(offers)


def cheapest_zone_first(
    offers: Iterable[Offer], spot: Mapping[tuple[str, str], float]
) -> tuple[Offer, ...]:
    """Return offers with the zones of each type on spot in the order of their prices, unknown ones last."""

    def usd(offer: Offer) -> float:
        return spot.get(offer.place, math.inf) if offer.market == SPOT else 0.0

    groups = groupby(offers, lambda offer: (offer.market, offer.type.name, offer.in_group))
    return tuple(chain.from_iterable(sorted(group, key=usd) for _, group in groups))


@dataclass(frozen=True)
class Purchase:
    """A request for ``count`` identical machines, all or none.

    ``known`` holds the ids of the cluster's current machines. The client token is a digest of them and
    the request, so a retry buys nothing twice, even after a crash.
    """

    spec: ClusterSpec
    role: str
    count: int
    image: Image
    group_id: str
    user_data: Callable[[Offer], bytes]
    labels: Mapping[str, str]
    known: frozenset[str]
    profile: str = ""
    """The instance profile made for this cluster."""
    refused: Sequence[Refusal] = ()
    """Earlier refusals, whose offers are not tried again."""


def buy(
    buyer: EC2Client,
    purchase: Purchase,
    offers: Sequence[Offer],
    *,
    clock: Clock | None = None,
    on_refusal: Callable[[Refusal], None] = lambda _: None,
    wait_for_end: Callable[[], bool] = lambda: False,
) -> tuple[Offer, tuple[Instance, ...]]:
    """Buy from the first offer that EC2 accepts. Raises :class:`NoCapacityError` if it accepts none.

    If EC2 accepts none, and machines that are shutting down may hold what is missing, ``wait_for_end``
    waits for them, once, and returns whether they have ended. Then all offers are tried again. If they
    hold the placement group, it waits before an offer without the group.
    """

    def buy_again() -> tuple[Offer, tuple[Instance, ...]]:
        return buy(buyer, purchase, offers, clock=clock, on_refusal=on_refusal)

    refusals = [refusal for refusal in purchase.refused if refusal.offer in offers]
    full = [refusal.offer for refusal in refusals]
    hopeless: set[tuple[str, ...]] = set()
    has_waited = False
    for offer in offers:
        where = (offer.market, *offer.place)
        if offer in full or {where, where[:2]} & hopeless:
            continue
        try:
            return offer, _run_instances(buyer, purchase, offer, clock)
        except ClientError as error:
            code = error_code(error)
            if not (code.startswith(_NO_ROOM) or code in {*_NO_QUOTA, _NOT_IN_ZONE}):
                raise
            if code in _NO_QUOTA:
                hopeless.add(where[:2])
            if code == _TOO_EXPENSIVE:
                hopeless.add(where)
            refusals.append(Refusal.of(offer, error))
            on_refusal(refusals[-1])
            # Machines outside the group would keep half the bandwidth for good.
            if code == _GROUP_IN_USE and not has_waited:
                has_waited = True
                if wait_for_end():
                    return buy_again()
    is_held = any(refusal.code in _HELD_TO_THE_END for refusal in refusals)
    if is_held and not has_waited and wait_for_end():
        return buy_again()
    raise NoCapacityError(purchase.count, refusals)


def _run_instances(
    buyer: EC2Client, purchase: Purchase, offer: Offer, clock: Clock | None
) -> tuple[Instance, ...]:
    request = render_request(purchase, offer)
    for number in range(_TOKENS_PER_OFFER):
        token = client_token(request, purchase.known, number)
        try:
            answer = _send(buyer, {**request, "ClientToken": token}, clock, purchase.profile)
        except ClientError as error:
            if error_code(error) not in _SPENT:
                raise
            continue
        bought = tuple(Instance.from_aws(i) for i in answer["Instances"])
        if all(instance.state in ("pending", "running") for instance in bought):
            return bought
    raise CloudError(
        f"{offer}: EC2 returned machines that have already ended",
        hint="run the same command again in a few minutes",
    )


def _send(
    buyer: EC2Client, request: dict[str, Any], clock: Clock | None, new_profile: str = ""
) -> Any:
    """Send a request and retry while EC2 is busy; the token prevents double purchases."""
    return retry(
        lambda: buyer.run_instances(**request),
        # A group, key, image, or profile created seconds ago may not be visible everywhere yet:
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_iam-ec2.html
        lambda error: (
            is_invisible(error)
            or is_passing(error)
            or (bool(new_profile) and "IAM Instance Profile" in str(error))
        ),
        deadline_s=CONSISTENCY_DEADLINE_S,
        clock=clock,
    )


def client_token(request: Mapping[str, Any], known: Iterable[str], number: int) -> str:
    """Return the n-th client token for a request; EC2 launches once per token.

    https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
    """
    text = json.dumps([request, sorted(known), number], sort_keys=True, default=repr)
    return f"spr-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def render_request(purchase: Purchase, offer: Offer) -> dict[str, Any]:
    """Return the parameters of RunInstances without the token. They tag every new resource."""
    spec = purchase.spec
    labels = tags.resource_tags(
        spec.name, purchase.role, **{tags.ROLE: purchase.role}, **purchase.labels
    )
    kinds = (*_RESOURCES, "spot-instances-request") if offer.market == SPOT else _RESOURCES
    request = {
        "ImageId": purchase.image.id,
        "InstanceType": offer.type.name,
        "MinCount": purchase.count,
        "MaxCount": purchase.count,
        "KeyName": tags.resource_name(spec.name),
        "UserData": purchase.user_data(offer),
        "NetworkInterfaces": [_interface(purchase, offer)],
        "BlockDeviceMappings": [{"DeviceName": purchase.image.root_device, "Ebs": _disk(purchase)}],
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        # A machine that shuts down at its deadline must not leave a billed disk behind.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tags.tag_specifications(kinds, labels),
    }
    if profile := spec.instance_profile or (purchase.profile if spec.makes_role else ""):
        request["IamInstanceProfile"] = {"Name": profile}
    if offer.in_group:
        request["Placement"] = {"GroupName": tags.resource_name(spec.name)}
    # Without a target, EC2 uses open reservations by itself.
    if id_ := spec.capacity_reservation:
        target = {"CapacityReservationId": id_}
        request["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if offer.market == SPOT:
        request["InstanceMarketOptions"] = _spot_options(spec)
    return request


def _interface(purchase: Purchase, offer: Offer) -> dict[str, Any]:
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "SubnetId": offer.network.subnet_id,
        "Groups": [purchase.group_id],
        "AssociatePublicIpAddress": not purchase.spec.private,
        "DeleteOnTermination": True,
    }
    if offer.ena_express:
        # Allows up to 25 Gbit/s for a single TCP flow between two such machines:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ena-express.html
        udp = {"EnaSrdUdpEnabled": True}
        interface["EnaSrdSpecification"] = {"EnaSrdEnabled": True, "EnaSrdUdpSpecification": udp}
    if offer.type.idle_tcp_s < _IDLE_TCP_S:
        interface["ConnectionTrackingSpecification"] = {"TcpEstablishedTimeout": _IDLE_TCP_S}
    return interface


def _disk(purchase: Purchase) -> dict[str, Any]:
    spec = purchase.spec
    speeds = {
        "Throughput": spec.volume_throughput,
        "Iops": spec.volume_iops,
        # https://docs.aws.amazon.com/ebs/latest/userguide/initalize-volume.html
        "VolumeInitializationRate": spec.volume_init_rate,
    }
    return {
        # The disk can't be smaller than the image's.
        "VolumeSize": max(spec.volume_gib, purchase.image.volume_gib),
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
        **{name: value for name, value in speeds.items() if value},
    }


def _spot_options(spec: ClusterSpec) -> dict[str, Any]:
    options: dict[str, Any] = {
        "SpotInstanceType": "one-time",
        "InstanceInterruptionBehavior": "terminate",
    }
    if spec.max_price is not None:
        options["MaxPrice"] = f"{spec.max_price:g}"
    return {"MarketType": "spot", "SpotOptions": options}
