"""The part that costs money: one small machine, for minutes, made and removed by the product itself."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field

from infra.instance_types import TABLE_REGION
from infra.inventory import describe_inventory
from infra.prices import table_prices
from tests.aws_check.check import Recording, run_commands, run_probes
from tests.aws_check.probes import TYPE, on_a_cluster
from tests.aws_check.report import Row
from tests.aws_check.sides import Side

TTL_MIN = 40
_VOLUME_GIB = 30


def usd_to_spend() -> float:
    """Return what the machine, its disk, and its address cost in us-east-1 until the machine ends itself."""
    hourly = table_prices(TABLE_REGION, [TYPE]).node(TYPE, _VOLUME_GIB)
    assert hourly, "the table knows this type"
    return hourly.usd * TTL_MIN / 60


@dataclass
class Life:
    """A cluster of one node, on each side."""

    name: str = field(default_factory=lambda: f"aws-check-{secrets.token_hex(3)}")

    @property
    def up(self) -> str:
        return (
            f"up --name {self.name} --nodes 1 --instance-type {TYPE} --ttl {TTL_MIN}m "
            f"--volume-gib {_VOLUME_GIB} --stack upstream --yes"
        )

    @property
    def status(self) -> str:
        return f"status --name {self.name} --json"

    @property
    def down(self) -> str:
        return f"down --name {self.name} --yes"

    def live(self, side: Side, recording: Recording) -> None:
        """Make the cluster, look at it, and remove it, whatever fails; twice if need be."""
        try:
            if run_commands(side, [self.up, self.status], recording):
                run_probes(side, on_a_cluster(self.name), recording)
        finally:
            self._remove(side, recording)

    def _remove(self, side: Side, recording: Recording) -> None:
        hint = f"if this is interrupted: spr-cluster {self.down} --region {side.region}"
        try:
            if side.name == "AWS":
                print(f"Removing the cluster; {hint}", file=sys.stderr)
            removed = run_commands(side, [self.down], recording)
        except KeyboardInterrupt:
            print(f"Still removing the cluster; {hint}", file=sys.stderr)
            removed = False
        if not removed:
            run_commands(side, [self.down], recording)

    def left(self, side: Side) -> Row:
        """Search for whatever is left."""
        left = describe_inventory(side.clients.ec2, self.name)
        details = (f"{left}: spr-cluster {self.down} --region {side.region}",) if left else ()
        return Row(
            "nothing is left", "it would cost money", "differs" if left else "same", details=details
        )
