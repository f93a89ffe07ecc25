"""Buying machines: one call for all of them, and an answer of ours to every way of being refused.

The order of what is tried: the placement group in each zone that offers the type, then the same
zones without it, then the next type; with spot, all of that again on demand where it is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from infra import key_pair, tags
from infra.clients import error_code, is_passing
from infra.errors import CloudError, DeadlineError
from infra.instances import Instance
from infra.network import Network, TypeSupport, placement_group_name
from infra.wait import CONSISTENCY_DEADLINE_S, Clock, wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

    from infra.images import Image
    from infra.instance_types import InstanceType
    from infra.spec import ClusterSpec

SPOT, ON_DEMAND = "spot", "on-demand"
_RESOURCES = ("instance", "volume", "network-interface")
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
_NO_ROOM = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientCapacity",
    "InsufficientFreeAddressesInSubnet",
    "Unsupported",
    # The group has machines in another zone, which still are on their way out.
    "InvalidPlacementGroup.InUse",
}
# Another zone has the same quota and nearly the same price: only another type or market may help.
_NO_QUOTA = {
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "SpotMaxPriceTooLow",
}
_HINTS = {
    "VcpuLimitExceeded": "the quota counts vCPUs (on-demand standard: L-1216C47A): ask for more in "
    "the console's Service Quotas, or use fewer --nodes",
    "MaxSpotInstanceCountExceeded": "the spot quota counts vCPUs (L-34B43A08): ask for more in the "
    "console's Service Quotas, or leave --spot out",
    "SpotMaxPriceTooLow": "a higher --max-price, or --spot-or-on-demand",
}
_NO_ROOM_HINT = (
    "another type or several (--instance-type r7iz.metal-16xl,m7i.metal-24xl), "
    "another --region, or later"
)
# What the same token bought before may be gone meanwhile; EC2 remembers a token for a day or more.
_SPENT = {"IdempotentInstanceTerminated", "IdempotentParameterMismatch"}
_TOKENS_PER_OFFER = 50


@dataclass(frozen=True)
class Offer:
    """One way to buy: what, where, on which market, and whether in the placement group."""

    machine: InstanceType
    network: Network
    market: str
    in_group: bool
    ena_express: bool = False

    @property
    def place(self) -> tuple[str, str]:
        return self.machine.name, self.network.zone

    def __str__(self) -> str:
        market = ", spot" if self.market == SPOT else ""
        group = ", in the placement group" if self.in_group else ""
        return f"{self.machine.name} in {self.network.zone}{market}{group}"


@dataclass(frozen=True)
class Refusal:
    """Why an offer did not work, in EC2's words."""

    offer: Offer
    code: str
    message: str


class NoCapacityError(CloudError):
    """Every offer was refused; the message lists what was tried and why it failed."""

    def __init__(self, count: int, refusals: Sequence[Refusal]) -> None:
        lines = "".join(f"\n  {r.offer}: {r.code}: {_first_sentence(r.message)}" for r in refusals)
        hints = [_HINTS[r.code] for r in refusals if r.code in _HINTS]
        what = f"{count} machines, together in one zone" if count > 1 else "machine"
        super().__init__(
            f"EC2 gives no {what}; tried:{lines}",
            code=refusals[0].code if refusals else "",
            hint=hints[0] if hints else _NO_ROOM_HINT,
        )
        self.refusals = tuple(refusals)


def _first_sentence(text: str) -> str:
    """EC2's reason; what it advises besides is about zones that are tried anyway."""
    return text.partition(". ")[0].rstrip(".")


def list_offers(
    spec: ClusterSpec, support: Mapping[str, TypeSupport], networks: Sequence[Network]
) -> tuple[Offer, ...]:
    """Every way to buy the machines of a spec, in the order of preference."""
    markets = [SPOT] if spec.spot else [ON_DEMAND]
    if spec.spot and spec.on_demand_allowed:
        markets.append(ON_DEMAND)
    wants_group = spec.placement_group and spec.nodes > 1
    offers = []
    for market in markets:
        for machine in spec.machines:
            known = support.get(machine.name)
            if known is None:
                continue
            places = [network for network in networks if network.zone in known.zones]
            groups = [True, False] if wants_group and known.cluster_groups else [False]
            offers += [
                Offer(machine, network, market, in_group, known.ena_express and spec.nodes > 1)
                for in_group in groups
                for network in places
            ]
    return tuple(offers)


@dataclass(frozen=True)
class Purchase:
    """What is wanted, wherever it is bought; ``count`` machines alike, all of them or none.

    ``known`` are the ids of the cluster's machines at this moment: with the request itself they
    make the client token, so that the same wish in the same situation buys only once, even when
    the answer to the first request was lost with the process that had sent it.
    """

    spec: ClusterSpec
    role: str
    count: int
    image: Image
    group_id: str
    user_data: str
    labels: Mapping[str, str]
    known: frozenset[str]


def buy(
    buyer: EC2Client,
    purchase: Purchase,
    offers: Iterable[Offer],
    *,
    clock: Clock | None = None,
    on_refusal: Callable[[Refusal], None] = lambda _: None,
) -> tuple[Offer, tuple[Instance, ...]]:
    """Buy by the first offer that EC2 accepts; raises :class:`NoCapacityError` where none is."""
    refusals: list[Refusal] = []
    hopeless: set[tuple[str, str]] = set()
    for offer in offers:
        if (offer.machine.name, offer.market) in hopeless:
            continue
        try:
            return offer, _run_instances(buyer, purchase, offer, clock)
        except ClientError as error:
            code = error_code(error)
            if code not in _NO_ROOM | _NO_QUOTA:
                raise
            if code in _NO_QUOTA:
                hopeless.add((offer.machine.name, offer.market))
            message = str(error.response.get("Error", {}).get("Message", ""))
            refusals.append(Refusal(offer, code, message))
            on_refusal(refusals[-1])
    raise NoCapacityError(purchase.count, refusals)


def _run_instances(
    buyer: EC2Client, purchase: Purchase, offer: Offer, clock: Clock | None
) -> tuple[Instance, ...]:
    request = render_request(purchase, offer)
    for number in range(_TOKENS_PER_OFFER):
        token = client_token(request, purchase.known, number)
        try:
            answer = _send(buyer, {**request, "ClientToken": token}, clock)
        except ClientError as error:
            if error_code(error) not in _SPENT:
                raise
            continue
        bought = tuple(Instance.from_aws(i) for i in answer["Instances"])
        if all(instance.state in ("pending", "running") for instance in bought):
            return bought
    raise CloudError(
        f"{offer}: EC2 answers with machines that have ended already",
        hint="run the same command again in some minutes",
    )


def _send(buyer: EC2Client, request: dict[str, Any], clock: Clock | None) -> Any:
    """Send a request until it is answered; its token makes the repetition safe."""
    failure: list[Exception] = []

    def attempt() -> Any | None:
        try:
            return buyer.run_instances(**request)
        except (ClientError, BotoCoreError) as error:
            # EC2 may not know yet, everywhere, of a group, key or image made seconds ago.
            unseen = isinstance(error, ClientError) and error_code(error).endswith(
                (".NotFound", ".Unknown", ".Unavailable")
            )
            if not unseen and not is_passing(error):
                raise
            failure.append(error)
            return None

    try:
        return wait_until("", attempt, deadline_s=CONSISTENCY_DEADLINE_S, clock=clock)
    except DeadlineError:
        raise failure[-1] from None


def client_token(request: Mapping[str, Any], known: Iterable[str], number: int) -> str:
    """The n-th token of a request; EC2 launches once per token.

    https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
    """
    text = json.dumps([request, sorted(known), number], sort_keys=True)
    return f"spr-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def render_request(purchase: Purchase, offer: Offer) -> dict[str, Any]:
    """RunInstances' parameters, without the token. Every resource is tagged by this very call."""
    spec = purchase.spec
    labels = tags.resource_tags(
        spec.name, purchase.role, **{tags.ROLE: purchase.role}, **purchase.labels
    )
    kinds = (*_RESOURCES, "spot-instances-request") if offer.market == SPOT else _RESOURCES
    request = {
        "ImageId": purchase.image.id,
        "InstanceType": offer.machine.name,
        "MinCount": purchase.count,
        "MaxCount": purchase.count,
        "KeyName": key_pair.key_name(spec.name),
        "UserData": purchase.user_data,
        "NetworkInterfaces": [_interface(purchase, offer)],
        "BlockDeviceMappings": [
            {"DeviceName": purchase.image.root_device, "Ebs": _disk(purchase)},
        ],
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        # A machine that ends itself, by its time to live, must not stay as a paid-for disk.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tags.tag_specifications(kinds, labels),
    }
    if offer.in_group:
        request["Placement"] = {"GroupName": placement_group_name(spec.name)}
    if offer.market == SPOT:
        request["InstanceMarketOptions"] = _spot_options(spec)
    return request


def _interface(purchase: Purchase, offer: Offer) -> dict[str, Any]:
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "SubnetId": offer.network.subnet_id,
        "Groups": [purchase.group_id],
        "AssociatePublicIpAddress": True,
        "DeleteOnTermination": True,
    }
    if offer.ena_express:
        # A single TCP flow of up to 25 Gbit/s where both ends have it:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ena-express.html
        udp = {"EnaSrdUdpEnabled": True}
        interface["EnaSrdSpecification"] = {"EnaSrdEnabled": True, "EnaSrdUdpSpecification": udp}
    return interface


def _disk(purchase: Purchase) -> dict[str, Any]:
    return {
        # EC2 refuses a disk that is smaller than the image's.
        "VolumeSize": max(purchase.spec.volume_gib, purchase.image.volume_gib),
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }


def _spot_options(spec: ClusterSpec) -> dict[str, Any]:
    options: dict[str, Any] = {
        "SpotInstanceType": "one-time",
        "InstanceInterruptionBehavior": "terminate",
    }
    if spec.max_price is not None:
        options["MaxPrice"] = f"{spec.max_price:g}"
    return {"MarketType": "spot", "SpotOptions": options}
