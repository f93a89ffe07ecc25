"""EC2 as moto serves it in this process, with every request written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from moto.ssm.models import Parameter, ssm_backends

from infra.clients import Clients, connect
from infra.cloud import Cloud
from infra.images import ubuntu_parameter

CALLER = "203.0.113.7/32"


@dataclass
class Recorder:
    """The EC2 calls of a test, in their order, as ``(operation, parameters)``."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def watch(self, clients: Clients) -> None:
        def record(params: dict[str, Any], model: Any, **_: Any) -> None:
            self.calls.append((model.name, params))

        clients.ec2.meta.events.register("provide-client-params.ec2.*", record)

    def operations(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, operation: str) -> list[dict[str, Any]]:
        return [params for name, params in self.calls if name == operation]


def fake_aws(*, has_amx: bool = True) -> Cloud:
    """AWS, with a caller address from the range that is kept for documentation."""
    return Cloud(
        name="aws",
        region="us-east-1",
        caller_cidr=lambda: CALLER,
        default_stack="intel",
        billed=True,
        has_amx=has_amx,
    )


def connect_moto(cloud: Cloud) -> Clients:
    """Clients whose SSM knows Canonical's parameters, which moto does not let anybody write."""
    clients = connect(cloud)
    backend = ssm_backends["123456789012"]["us-east-1"]
    image = clients.ec2.describe_images(Filters=[{"Name": "owner-id", "Values": ["099720109477"]}])[
        "Images"
    ][0]["ImageId"]
    for release in ("22.04", "24.04"):
        name = ubuntu_parameter(release)
        backend._parameters[name].append(_parameter(name, image))
    return clients


def _parameter(name: str, value: str) -> Any:
    return Parameter(
        account_id="123456789012",
        name=name,
        value=value,
        parameter_type="String",
        description="",
        allowed_pattern=None,
        keyid=None,
        last_modified_date=datetime.now(timezone.utc),
        version=1,
        data_type="text",
    )
