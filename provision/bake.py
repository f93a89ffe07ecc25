"""Making an AMI of a running head node, without its secrets in it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from infra import images
from infra.errors import HostError
from infra.progress import Progress
from infra.wait import Clock, wait_until
from provision.host import Host, sudo

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import FilterTypeDef

# The machine's own identity goes to memory while the disk is copied: an image must not hold its
# host keys, nor a machine id that two machines would share. A copy of the machine makes its own.
# Should this tool die meanwhile, the machine takes its identity back by itself after half an hour.
_SEAL = """
set -e
install -d -m 700 /run/spr-cluster
cat > /run/spr-cluster/unseal <<'EOF'
cp -a /run/spr-cluster/ssh_host_* /etc/ssh/
cat /run/spr-cluster/machine-id > /etc/machine-id
EOF
cp -a /etc/ssh/ssh_host_* /etc/machine-id /run/spr-cluster/
systemd-run --quiet --collect --unit=spr-cluster-unseal --on-active=30min sh /run/spr-cluster/unseal
rm -f /etc/ssh/ssh_host_* /root/.bash_history /home/*/.bash_history
: > /etc/machine-id
apt-get clean
rm -rf /var/lib/apt/lists/* /home/*/.cache/pip /root/.cache/pip
sync
"""
_UNSEAL = "sh /run/spr-cluster/unseal && systemctl stop spr-cluster-unseal.timer"
# EC2 begins the copy within seconds of the call; until then the disk must stay as it is.
_COPY_BEGINS_DEADLINE_S = 10 * 60
_SEAL_DEADLINE_S = 10 * 60


def bake_image(
    ec2: EC2Client,
    host: Host,
    instance_id: str,
    cluster: str,
    progress: Progress,
    clock: Clock | None = None,
) -> images.Image:
    """Make an image of a machine and wait until it can be used."""
    name = f"spr-cluster-{cluster}-{instance_id}"
    try:
        # Gigabytes of new software are written to disk here.
        host.run(sudo(_SEAL), timeout_s=_SEAL_DEADLINE_S)
        image_id = images.create_image(ec2, instance_id, cluster, name)
        _wait_until_copy_begins(ec2, image_id, clock)
    except BaseException:
        with suppress(HostError):  # the timer does it, if the machine can't be reached now
            host.run(sudo(_UNSEAL), check=False)
        raise
    host.run(sudo(_UNSEAL))
    return images.wait_until_available(ec2, image_id, progress, clock)


def _wait_until_copy_begins(ec2: EC2Client, image_id: str, clock: Clock | None) -> None:
    """Wait for the image's snapshot, whose content is that of the moment in which it starts."""
    # EC2 names the image in the description of the snapshots that it makes for it.
    of_image: list[FilterTypeDef] = [{"Name": "description", "Values": [f"*{image_id}*"]}]

    def probe() -> bool | None:
        found = ec2.describe_snapshots(OwnerIds=["self"], Filters=of_image)["Snapshots"]
        return True if found else None

    wait_until(
        f"snapshot of image {image_id}", probe, deadline_s=_COPY_BEGINS_DEADLINE_S, clock=clock
    )
