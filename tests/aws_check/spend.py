"""The part that costs money: two small machines, made, used, and removed by the product itself."""

from __future__ import annotations

import secrets
import sys
import tempfile
from dataclasses import dataclass, field

from infra.cost.prices import table_prices
from infra.ec2.instances import WORKER
from infra.ec2.inventory import describe_inventory
from infra.instance_types import TABLE_REGION
from tests.aws_check.check import Recording, run_commands, run_probes
from tests.aws_check.probes import TYPE, on_a_cluster
from tests.aws_check.report import Row
from tests.aws_check.sides import Side

TTL_MIN = 90
_NODES, _VOLUME_GIB = 2, 30
MACHINES = f"{_NODES} {TYPE}"


def usd_to_spend() -> float:
    """Return what the machines, their disks, and addresses cost in us-east-1 until they end themselves."""
    hourly = table_prices(TABLE_REGION, [TYPE]).node(TYPE, _VOLUME_GIB)
    assert hourly, "the table knows this type"
    # And the one that replaces another.
    return hourly.usd * (_NODES + 1) * TTL_MIN / 60


@dataclass
class Life:
    """A cluster of two nodes, on each side."""

    name: str = field(default_factory=lambda: f"aws-check-{secrets.token_hex(3)}")

    @property
    def _options(self) -> str:
        # The workers start from an image of the head, and so does the machine that replaces one.
        return (
            f"--name {self.name} --nodes {_NODES} --instance-type {TYPE} --ttl {TTL_MIN}m "
            f"--volume-gib {_VOLUME_GIB} --stack upstream --bake head"
        )

    @property
    def doctor(self) -> str:
        return f"doctor {self._options}"

    @property
    def down(self) -> str:
        return f"down --name {self.name} --yes"

    def live(self, side: Side, recording: Recording) -> None:
        """Make the cluster, use it, and remove it, whatever fails; twice if need be."""
        try:
            commands = [f"up {self._options} --yes", f"status --name {self.name} --json"]
            if run_commands(side, commands, recording):
                run_probes(side, on_a_cluster(self.name), recording)
                self._work(side, recording)
        finally:
            self._remove(side, recording)

    def _work(self, side: Side, recording: Recording) -> None:
        """Train on both nodes, lose one, and replace it. The simulated machines can't train."""
        with tempfile.TemporaryDirectory() as folder:
            train = f"train digits --name {self.name} --results {folder}/results"
            if side.name == "AWS" and not run_commands(side, [train], recording):
                return
        lost = self._workers(side)
        side.clients.ec2.terminate_instances(InstanceIds=list(lost))
        if run_commands(side, [f"repair --name {self.name} --yes"], recording):
            new = {image for id_, image in self._workers(side).items() if id_ not in lost}
            what = "(the new machine starts from the image of the lost one)"
            recording.commands[what] = "" if new == set(lost.values()) else "it did not"

    def _workers(self, side: Side) -> dict[str, str]:
        """Return the image of each worker, by its ID."""
        found = describe_inventory(side.clients.ec2, self.name, ("instances",))
        return {machine.id: machine.image_id for machine in found.alive if machine.role == WORKER}

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
