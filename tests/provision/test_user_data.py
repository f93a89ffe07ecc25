"""The user data, and the boot script in it, run for real."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib import resources

import botocore.session
import pytest

from infra.lifetime import Lifetime
from provision.user_data import IDLE_FILE, render_user_data
from tests.provision.machine import Machine

EXPIRES = datetime(2026, 12, 24, 18, tzinfo=timezone.utc)
WARM = resources.files("provision.on_node").joinpath("warm.sh").read_text()
LIFE = Lifetime(EXPIRES, EXPIRES + timedelta(hours=1), timedelta(minutes=30))


def boot_script(lifetime: Lifetime = LIFE, *, ena_express: bool = False) -> str:
    """What cloud-init makes of the list of commands: one shell script."""
    packed = render_user_data(lifetime, "eu-central-1", ena_express=ena_express)
    _, _, body = gzip.decompress(packed).decode().partition("\n")
    return "\n".join(json.loads(body)["bootcmd"])


def boot(machine: Machine, lifetime: Lifetime = LIFE, *, ena_express: bool = False) -> None:
    for name in ("systemctl", "systemd-run", "sysctl", "ip"):
        machine.replace(name)
    machine.replace("systemd-detect-virt", "false")
    machine.path("/etc/hosts").touch()
    script = boot_script(lifetime, ena_express=ena_express)
    done = machine.shell(script, program="sh")
    assert (done.returncode, done.stderr) == (0, "")


def test_user_data_is_json_that_cloud_init_runs_at_every_boot(machine: Machine) -> None:
    user_data = render_user_data(LIFE, "eu-central-1", ena_express=True)
    header, _, body = gzip.decompress(user_data).decode().partition("\n")

    assert header == "#cloud-config"
    # runcmd and write_files run at the first boot only, and what they leave would be in an image.
    assert set(json.loads(body)) == {"package_update", "bootcmd"}
    # EC2 takes 16 KiB.
    assert len(user_data) < 13_000

    boot(machine)
    found = [path.relative_to(machine.root) for path in machine.root.rglob("*") if path.is_file()]
    made = {str(path) for path in found if path.parts[0] != "run"}
    # The mark is in the instance's own folder, which a copy of the machine does not look into.
    # Each boot replaces this machine's lines of the environment.
    own = {f"var/lib/cloud/instance/spr-cluster-{name}" for name in ("fresh", "idle")}
    assert made == {"etc/hosts", "etc/environment", *own}


def test_the_guards_are_started_without_waiting_for_the_boot(machine: Machine) -> None:
    boot(machine, replace(LIFE, idle=timedelta(hours=1)))

    names = ["expiry", "keeper", "idle"]
    timers = " ".join(f"spr-cluster-{name}.timer" for name in names)
    # In this order; to wait for a unit would be to wait for this very boot to end.
    started = ["systemctl daemon-reload", f"systemctl restart --no-block {timers}"]
    assert machine.calls[:2] == started
    assert machine.calls[2].startswith("systemctl mask --now apt-daily.timer")
    units = machine.path("/run/systemd/system")
    assert len([*units.iterdir()]) == 2 * len(names)
    for name in names:
        timer = (units / f"spr-cluster-{name}.timer").read_text()
        service = (units / f"spr-cluster-{name}.service").read_text()
        assert "OnActiveSec=30s\nOnUnitInactiveSec=30s\n" in timer
        assert all("DefaultDependencies=no" in unit for unit in (timer, service))
        script = machine.path(f"/run/spr-cluster/{name}")
        assert f"ExecStart=/bin/sh {script}\n" in service
        assert script.exists()
    expiry = machine.path("/run/spr-cluster/expiry").read_text()
    assert f"launch_expires={int(EXPIRES.timestamp())}\n" in expiry
    # A new disk is read in the background, without waiting for it.
    (warm,) = [call for call in machine.calls if call.startswith("systemd-run")]
    assert warm.endswith(f"/bin/sh {machine.path('/run/spr-cluster/warm')}")
    assert {"--no-block", "IOSchedulingClass=idle"} <= {*warm.split()}
    # An idle timeout that was set later than the launch's stays.
    boot(machine, replace(LIFE, idle=timedelta(hours=2)))
    assert machine.path(IDLE_FILE).read_text() == "3600\n"
    # A guard that does not start is a failed boot.
    machine.replace("systemctl", '[ "$1" != restart ]')
    assert machine.shell(boot_script(), program="sh").returncode != 0


def test_all_cores_run_with_the_performance_governor_at_every_boot(machine: Machine) -> None:
    governors = [
        machine.path(f"/sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor")
        for number in (0, 1, 63)
    ]
    for path in governors:
        path.parent.mkdir(parents=True)
        path.write_text("powersave\n")

    boot(machine)

    assert [path.read_text() for path in governors] == ["performance\n"] * 3
    assert "systemctl mask ondemand.service" in machine.calls


@pytest.mark.parametrize("before", ["", "A=b", 'PATH="/bin"\nAWS_REGION=of-the-image\n'])
def test_every_session_of_a_node_knows_its_region_and_waits_for_credentials(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    if before:
        machine.path("/etc/environment").write_text(before)
    for _ in range(2):
        boot(machine)

    text = machine.path("/etc/environment").read_text()
    assert text.count("AWS_REGION=") == 1
    assert text.startswith(f"{line}\n" if (line := before.partition("\n")[0]) else "AWS_REGION=")
    found = dict(line.split("=", 1) for line in text.splitlines())
    assert found["AWS_REGION"] == found["AWS_DEFAULT_REGION"] == "eu-central-1"
    # Instance metadata may take longer to answer than botocore waits by default, and fail once.
    for name in found.keys() - {"A", "PATH"}:
        monkeypatch.setenv(name, found[name])
    session = botocore.session.Session()
    assert session.get_config_variable("metadata_service_timeout") == 20
    assert session.get_config_variable("metadata_service_num_attempts") == 3


def test_a_copy_of_a_machine_forgets_its_parents_cluster_once(machine: Machine) -> None:
    ssh = "/home/ubuntu/.ssh"
    keys = ("authorized_keys", "spr-cluster", "spr-cluster.pub", "config", "known_hosts")
    slurm = ("/etc/slurm/slurm.conf", "/etc/munge/munge.key", "/var/spool/spr-cluster-slurm/jobs")
    parents = [*(f"{ssh}/{name}" for name in keys), *slurm, "/home/ubuntu/hosts"]
    for path in map(machine.path, (*parents, f"{ssh}/id_own")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the parent")
    hosts = machine.path("/etc/hosts")
    lines = "# spr-cluster begin\n172.31.0.4 node0\n# spr-cluster end\n"
    hosts.write_text(f"127.0.0.1 localhost\n{lines}::1 six\n")

    boot(machine)

    assert not [path for path in parents if machine.path(path).exists()]
    assert machine.path(f"{ssh}/id_own").exists(), "it is not ours"
    assert not machine.path("/var/spool/spr-cluster-slurm").exists()
    assert hosts.read_text() == "127.0.0.1 localhost\n::1 six\n"
    # Later boots leave alone what cloud-init and `up` have written since.
    machine.path(parents[0]).write_text("of the owner")
    boot(machine)
    assert machine.path(parents[0]).read_text() == "of the owner"


# ENA Express


def add_interface(machine: Machine, name: str, driver: str) -> None:
    """An interface with AWS's MTU, and one send queue."""
    device = machine.path(f"/sys/class/net/{name}")
    (device / "queues/tx-0/byte_queue_limits").mkdir(parents=True)
    (device / "queues/tx-0/byte_queue_limits/limit_min").write_text("0\n")
    (device / "mtu").write_text("9001\n")
    (device / "device").mkdir()
    (device / "device/driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


def boot_with_express(machine: Machine) -> list[str]:
    """Boot; return the calls that change the network."""
    boot(machine, ena_express=True)
    calls = [call for call in machine.calls if "keepalive" not in call]
    return [call for call in calls if call.startswith(("ip ", "ethtool ", "sysctl "))]


def test_ena_express_gets_its_settings_at_every_boot_and_its_mtu_again_and_again(
    machine: Machine,
) -> None:
    add_interface(machine, "ens5", "ena")
    add_interface(machine, "eth0", "veth")
    machine.replace("ethtool", "exit 127")  # the rest happens all the same

    first = boot_with_express(machine)
    mtu = ["ip link set ens5 mtu 8900"]
    assert first == ["sysctl -qw net.ipv4.tcp_autocorking=0", "ethtool -G ens5 rx 8192", *mtu]
    limit = machine.path("/sys/class/net/ens5/queues/tx-0/byte_queue_limits/limit_min")
    assert limit.read_text() == "max\n"

    # A new DHCP lease sets 9001 again; the timer's next run mends that alone.
    script = machine.path("/run/spr-cluster/ena-express").read_text()
    assert machine.shell(script, program="sh").returncode == 0
    assert machine.calls[-1:] == mtu
    assert sum(call.startswith("ethtool") for call in machine.calls) == 1
    machine.path("/sys/class/net/ens5/mtu").write_text("8900\n")
    before = machine.calls
    assert machine.shell(script, program="sh").returncode == 0
    assert machine.calls == before

    assert "spr-cluster-ena-express.timer" in machine.calls[1]


def test_a_container_stays_as_it_is(machine: Machine) -> None:
    add_interface(machine, "eth0", "veth")
    machine.replace("ethtool")

    assert boot_with_express(machine) == []
    # Its disk is the user's, and not read.
    machine.path("/opt/spr-cluster").mkdir(parents=True)
    machine.replace("findmnt", "echo overlay")
    before = len(machine.calls)
    assert machine.shell(WARM, program="sh").returncode == 0
    assert machine.calls[before:] == ["findmnt -no SOURCE /"]


# The first read of a disk


_ALSO_READ = (
    "/home/ubuntu/spr-packages/0123/peft/model.py",
    "/var/usr/lib/python3.12/json.py",
    "/var/usr/lib/gcc/x86_64-linux-gnu/13/cc1plus",
    "/var/usr/bin/x86_64-linux-gnu-ld.bfd",
    "/var/usr/include/math.h",
    "/var/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
)


def test_every_byte_of_the_software_is_read(machine: Machine) -> None:
    """By the script itself, on a disk that is said to be a block device."""
    venv = machine.path("/opt/spr-cluster/venv/lib")
    venv.mkdir(parents=True)
    (venv / "small one.py").write_bytes(b"s" * 5000)
    (venv / "large.so").write_bytes(b"l" * (40 << 20))
    # Of the system, not all is there, such as /usr/libexec.
    for size, place in enumerate(_ALSO_READ, 1):
        machine.path(place).parent.mkdir(parents=True, exist_ok=True)
        machine.path(place).write_bytes(b"x" * size)
    machine.path("/var/usr/bin/other").write_bytes(b"not read")
    machine.replace("findmnt", "echo /dev/disk")
    read = machine.folder / "read"
    machine.replace("cat", f'for f in "$@"; do wc -c <"$f" >>{read}; done')
    machine.replace("dd", f'/bin/dd "$@" of=/dev/stdout | wc -c >>{read}')
    # No block device is here, and this machine's own files are not read.
    script = WARM.replace("[ -b ", "[ -n ").replace("/usr/", "/var/usr/")

    done = machine.shell(script, program="sh")

    assert (done.returncode, done.stderr) == (0, "")
    small = [*range(1, len(_ALSO_READ) + 1), 5000]
    assert sorted(map(int, read.read_text().split())) == [*small, 8 << 20, 16 << 20, 16 << 20]
