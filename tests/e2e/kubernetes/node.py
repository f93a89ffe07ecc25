"""A real node of the control plane: kubelet and containerd in their own namespaces, pods on a bridge."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tests.e2e.kubernetes.control_plane import BINARIES, NODE, ControlPlane, program, wait_for

PAUSE = "localhost/spr-cluster-pause:1.20.2"
"""The image that holds a pod's network."""
_SCRIPT = Path(__file__).with_name("node.sh")
# Most of it is the import of a large image.
_START_S = 600.0
_KUBELET_FOLDER = Path("/var/lib/kubelet")
# A range for tests of networks, to which no route leads: https://www.rfc-editor.org/rfc/rfc2544
_BRIDGE, _ADDRESS, _SUBNET = "spr-pods", "198.18.77.1", "198.18.77.0/24"
_AUTHENTICATION = {"anonymous": {"enabled": False}, "webhook": {"enabled": False}}
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "address": _ADDRESS,
    "healthzPort": 0,
    # Only the API server gets as far as that.
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    # This version needs all control groups to be of one kind; containers are limited all the same.
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "makeIPTablesUtilChains": False,
    "failSwapOn": False,
    # The disk of a developer's machine may be nearly full.
    "evictionHard": {"memory.available": "10Mi"},
    "imageGCHighThresholdPercent": 100,
}
_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{binaries}"
conf_dir = "{folder}"
"""


@contextmanager
def running_node(plane: ControlPlane, images: Path) -> Iterator[None]:
    """Run a node that has the images of an archive; in the end, remove everything of it."""
    folder = plane.folder / "node"
    folder.mkdir()
    _write_files(folder, plane)
    words = ["unshare", "--mount", "--pid", "--kill-child", "--mount-proc", str(_SCRIPT)]
    words += [str(BINARIES), str(folder), str(images), f"--config={folder / 'kubelet.yaml'}"]
    words += [f"--kubeconfig={plane.write_kubeconfig('node.kubeconfig', NODE)}"]
    words += [f"--root-dir={folder / 'kubelet'}", f"--cert-dir={folder / 'certs'}"]
    words += [f"--hostname-override={NODE}", f"--node-ip={_ADDRESS}"]
    with _bridge(), _kubelet_folder(), program(folder / "node.log", words) as node:
        try:
            wait_for("the node", lambda: _is_ready(plane, node, folder), _START_S)
            yield
        finally:
            # unshare ignores SIGTERM; with it ends all that it has started.
            node.kill()


def _write_files(folder: Path, plane: ControlPlane) -> None:
    authority = {"x509": {"clientCAFile": str(plane.kubelet_client[0])}}
    kubelet = {**_KUBELET, "authentication": {**_AUTHENTICATION, **authority}}
    (folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
    text = _CONTAINERD.format(folder=folder, pause=PAUSE, binaries=BINARIES)
    (folder / "containerd.toml").write_text(text)
    addresses = {"type": "host-local", "dataDir": str(folder), "ranges": [[{"subnet": _SUBNET}]]}
    network = {"cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": _BRIDGE}
    (folder / "pods.conf").write_text(json.dumps({**network, "ipam": addresses}))


def _is_ready(plane: ControlPlane, node: subprocess.Popen[bytes], folder: Path) -> bool:
    assert node.poll() is None, f"the node ended:\n{(folder / 'node.log').read_text()[-2000:]}"
    return plane.answers("wait", "--for=condition=Ready", "--timeout=1s", f"node/{NODE}")


@contextmanager
def _bridge() -> Iterator[None]:
    """Make the bridge of the pods, whose address is the node's."""
    # A run that was killed has left it.
    subprocess.run(["ip", "link", "delete", _BRIDGE], check=False, capture_output=True)
    _ip("link", "add", _BRIDGE, "type", "bridge")
    try:
        _ip("addr", "add", f"{_ADDRESS}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        yield
    finally:
        _ip("link", "delete", _BRIDGE)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def _kubelet_folder() -> Iterator[None]:
    """Have the folder that the node covers with its own; remove it, and the pods' control groups."""
    existed, groups = _KUBELET_FOLDER.exists(), _groups()
    _KUBELET_FOLDER.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if not existed:
            _KUBELET_FOLDER.rmdir()
        for group in _groups() - groups:
            for each in (*group.iterdir(), group):
                with suppress(OSError):  # files, which go with their folder
                    each.rmdir()


def _groups() -> set[Path]:
    """Return the control groups of all pods of this machine."""
    return {*Path("/sys/fs/cgroup").glob("*/k8s.io")}
