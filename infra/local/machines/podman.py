"""podman: the only module that calls the container engine."""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import CloudError, UsageError
from infra.files import read_text

CLOUD_LABEL = "org.spr-cluster.cloud"
INSTANCE_LABEL = "org.spr-cluster.instance"
REGION_LABEL = "org.spr-cluster.region"

# The hook adds the address of EC2's instance metadata, which a container can't add itself.
HOOKS = Path(__file__).parent / "hooks"
_QUICK_S = 60.0
_COPY_S = 3600.0
# Gigabytes of files: a busy disk takes more than a minute.
_REMOVE_S = 900.0
# systemd stops a node in about half a second; a job that ignores signals can take longer.
_STOP_GRACE_S = 20


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host that a node can read."""

    source: Path
    target: str


@dataclass(frozen=True)
class ContainerSpec:
    """A container that acts as a machine; ``image`` is a podman image, or a folder with a whole disk."""

    name: str
    image: str | Path
    hostname: str
    network: str
    address: str
    cpus: tuple[int, ...]
    labels: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True)
class Container:
    """A container as podman lists it; ``pid`` is 0 if it does not run."""

    name: str
    running: bool
    pid: int
    exit_code: int
    labels: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_podman(entry: dict[str, Any]) -> Container:
        return Container(
            name=str(entry["Names"][0]),
            running=entry["State"] == "running",
            pid=int(entry.get("Pid") or 0),
            exit_code=int(entry.get("ExitCode") or 0),
            labels=dict(entry.get("Labels") or {}),
        )


@dataclass(frozen=True)
class PodmanNetwork:
    """A podman network with its address ranges."""

    name: str
    ranges: tuple[ipaddress.IPv4Network, ...]
    labels: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_podman(entry: dict[str, Any]) -> PodmanNetwork:
        subnets = [ipaddress.ip_network(s["subnet"]) for s in entry.get("subnets") or []]
        return PodmanNetwork(
            name=str(entry["name"]),
            ranges=tuple(s for s in subnets if isinstance(s, ipaddress.IPv4Network)),
            labels=dict(entry.get("labels") or {}),
        )


def node_ulimits() -> list[str]:
    """Return limits that podman can set without CAP_SYS_RESOURCE, well below this process's limits.

    Without that capability, podman's defaults and values near the hard limit fail with
    `setrlimit … Operation not permitted`.
    """
    options = []
    limits = (("nofile", resource.RLIMIT_NOFILE, 65536), ("nproc", resource.RLIMIT_NPROC, 32768))
    for name, kind, usual in limits:
        hard = resource.getrlimit(kind)[1]
        limit = usual if hard == resource.RLIM_INFINITY else min(usual, max(hard // 4, 1024))
        options += ["--ulimit", f"{name}={limit}:{limit}"]
    return options


def mac_of(address: str) -> str:
    """Derive a MAC address, so that the host's ARP cache stays valid when an IP address is reused."""
    return "02:42:" + ":".join(f"{byte:02x}" for byte in ipaddress.IPv4Address(address).packed)


def run_arguments(spec: ContainerSpec) -> list[str]:
    """Return the arguments of `podman run` that make a container act as a machine."""
    options = {
        "--name": spec.name,
        "--hostname": spec.hostname,
        # Nodes resolve each other's host names, as with EC2's DNS.
        "--network-alias": spec.hostname,
        "--systemd": "always",
        "--network": spec.network,
        "--ip": spec.address,
        "--mac-address": mac_of(spec.address),
        "--cpuset-cpus": ",".join(map(str, spec.cpus)),
        # podman's default, 64 MiB, is too small for MPI and PyTorch's data loaders.
        "--shm-size": "8g",
        # Lets the kernel distinguish a reboot (exit code 129, SIGHUP) from a power-off (130, SIGINT):
        # https://man7.org/linux/man-pages/man2/reboot.2.html ("Behavior inside PID namespaces").
        "--cap-add": "SYS_BOOT",
    }
    flags = [f"{key}={value}" for key, value in options.items()]
    labels = [f"--label={key}={value}" for key, value in spec.labels.items()]
    mounts = [f"--volume={m.source}:{m.target}:ro" for m in spec.mounts]
    # ":O" stores the node's changes in an overlay; the folder stays unchanged.
    disk = ["--rootfs", f"{spec.image}:O"] if isinstance(spec.image, Path) else [spec.image]
    # Nodes manage /etc/hosts themselves, and they can't rename a file onto podman's bind mount.
    return [*flags, "--no-hosts", *node_ulimits(), *labels, *mounts, *disk, "/sbin/init"]


def choose_runtime() -> list[str]:
    """Choose runc for cgroups version 1, which crun rejects; otherwise, let podman choose."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return []
    runc = shutil.which("runc")
    if not runc:
        raise UsageError(
            "this machine has cgroups version 1, which needs runc",
            hint="apt-get install --no-install-recommends runc",
        )
    return ["--runtime", runc]


class Podman:
    """podman's command line; every call has a time limit."""

    def __init__(self) -> None:
        self._prefix = ["podman", *choose_runtime()]
        self.environment = dict(os.environ)

    def call(
        self, *arguments: str, timeout_s: float = _QUICK_S, stdin: Any = subprocess.DEVNULL
    ) -> str:
        """Run `podman …` and return its output. Raises :class:`CloudError`."""
        what = " ".join(a for a in arguments[:2] if not a.startswith("-"))
        hooks = [f"--hooks-dir={HOOKS}"] if arguments[0] in ("run", "start") else []
        try:
            done = subprocess.run(
                [*self._prefix, *hooks, *arguments],
                stdin=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=self.environment,
            )
        except subprocess.TimeoutExpired:
            raise CloudError(
                f"podman {what}: no answer within {timeout_s:.0f} s", code="InternalError"
            ) from None
        except OSError as error:
            raise CloudError(f"podman can't be run: {error}", code="InternalError") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise CloudError(f"podman {what}: {lines[-1]}", code="InternalError")
        return done.stdout

    def _json(self, *arguments: str) -> Any:
        return json.loads(self.call(*arguments, "--format", "json") or "[]") or []

    # Containers

    def run(self, spec: ContainerSpec) -> None:
        self.call("run", "--detach", "--pull=never", *run_arguments(spec))

    def start(self, name: str) -> None:
        # A container that has just ended may still have its network, where the hook's address exists.
        with suppress(CloudError):
            self.call("container", "cleanup", name)
        self.call("start", name)

    def stop(self, name: str) -> None:
        self.call("stop", "--time", str(_STOP_GRACE_S), name)

    def remove(self, names: Iterable[str]) -> None:
        """Kill and remove containers, if they still exist."""
        if listed := list(names):
            command = ("rm", "--force", "--ignore", "--time", "0", *listed)
            self.call(*command, timeout_s=_REMOVE_S)

    def containers(self, label: str) -> list[Container]:
        """Return all containers with this label, in any state."""
        entries = self._json("ps", "--all", "--filter", f"label={label}")
        return [Container.from_podman(entry) for entry in entries]

    def is_alive(self, pid: int) -> bool:
        """Return whether a container's first process exists. Does not call podman."""
        return Path(f"/proc/{pid}").exists()

    def host_keys(self, pid: int, made: str, proc: Path = Path("/proc")) -> tuple[str, ...]:
        """Return the public SSH host keys of the container whose first process is ``pid``.

        Returns none until the file ``made`` exists, because the keys may be the parent image's.
        """
        disk = proc / str(pid) / "root"
        try:
            if not (disk / made).exists():
                return ()
            files = sorted((disk / "etc/ssh").glob("ssh_host_*_key.pub"))
            # A link could point outside the container.
            return tuple(read_text(f).strip() for f in files if not f.is_symlink())
        except (OSError, UsageError):
            return ()

    # Images

    def copy_disk(self, container: str, target: Path) -> None:
        """Copy a running container's disk, without its mounts, into a new folder.

        For a node with PyTorch, this takes 6 s; `podman commit`, which packs and hashes, takes 55 s.
        """
        inspected = json.loads(self.call("inspect", container))[0]
        if not (pid := inspected["State"]["Pid"]):
            raise CloudError(f"{container} is not running", code="InternalError")
        target.mkdir(mode=0o755, parents=True)
        try:
            done = subprocess.run(
                ["cp", "--archive", "--one-file-system", f"/proc/{pid}/root/.", str(target)],
                env={**self.environment, "LC_ALL": "C"},
                capture_output=True,
                text=True,
                timeout=_COPY_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CloudError(f"can't copy the disk: {error}", code="InternalError") from None
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # A process that has ended still has a folder in /proc until podman notices, but no disk.
        if Path(f"/proc/{pid}/root/.").exists():
            # What a running node deletes meanwhile is not missing.
            lines = [line for line in lines if not line.endswith(": No such file or directory")]
        if done.returncode and lines:
            raise CloudError(f"can't copy the disk: {lines[-1]}", code="InternalError")
        # It names a socket of this embedded cloud; the server writes it on each node.
        names = ["root/.aws/config", "home/ubuntu/.aws/config"]
        # cp skips mounted folders, but not mounted files.
        for name in [*names, *(mount["Destination"].lstrip("/") for mount in inspected["Mounts"])]:
            file = target / name
            # A link could lead out of the copy, to a file of the host.
            links = (p for p in file.parents if target in p.parents and p.is_symlink())
            if not any(links) and (file.is_symlink() or file.is_file()):
                file.unlink()

    def images(self, reference: str) -> list[str]:
        """Return the names of the images that match a pattern such as ``localhost/name:*``."""
        entries = self._json("images", "--filter", f"reference={reference}")
        return sorted({name for entry in entries for name in entry.get("Names") or []})

    def image_label(self, image: str, label: str) -> str:
        return self.call(
            "image", "inspect", "--format", f'{{{{index .Config.Labels "{label}"}}}}', image
        ).strip()

    def remove_image(self, image: str) -> None:
        """Remove an image that no container uses, if it still exists."""
        if self.images(image):
            self.call("rmi", image)

    def prune_images(self, label: str) -> None:
        """Remove unused, untagged images with this label."""
        self.call("image", "prune", "--force", "--filter", f"label={label}")

    # Networks

    def networks(self) -> list[PodmanNetwork]:
        return [PodmanNetwork.from_podman(n) for n in self._json("network", "ls")]

    def create_network(
        self, name: str, subnet: str, gateway: str, labels: Mapping[str, str]
    ) -> None:
        flags = [f"--label={key}={value}" for key, value in labels.items()]
        self.call("network", "create", f"--subnet={subnet}", f"--gateway={gateway}", *flags, name)

    def remove_networks(self, names: Sequence[str]) -> None:
        if names:
            self.call("network", "rm", "--force", *names)


def open_podman(folder: Path) -> Podman:
    """Return podman with the netavark backend, which supports fixed addresses in any range.

    Debian 12's podman may default to the older CNI. The host's configuration stays unchanged.
    """
    podman = Podman()
    if podman.call("info", "--format", "{{.Host.NetworkBackend}}").strip() != "netavark":
        configuration = folder / "containers.conf"
        configuration.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        configuration.write_text('[network]\nnetwork_backend = "netavark"\n')
        podman.environment["CONTAINERS_CONF"] = str(configuration)
    return podman
