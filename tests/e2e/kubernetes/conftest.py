"""A real control plane with PyTorchJobs, and a namespace of it for each test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.places.kubernetes.manifests import Manifest
from tests.e2e.kubernetes.control_plane import BINARIES, PROGRAMS, ControlPlane, running, wait_for
from tests.harness.command_line import CommandResult
from tests.jobs.cli.test_main import run
from tests.jobs.places.kubernetes.schemas import DEFINITION, read_definition

BUILD = Path(__file__).with_name("build.sh")
MARKS = [
    pytest.mark.full,
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(
        not all((BINARIES / name).is_file() for name in PROGRAMS),
        reason=f"no Kubernetes in {BINARIES}: {BUILD} builds it",
    ),
    pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl"),
]
_RBAC = "rbac.authorization.k8s.io"
# The role that docs/kubernetes.md asks for, and no more.
RULES = [
    {
        "apiGroups": ["kubeflow.org"],
        "resources": ["pytorchjobs"],
        "verbs": ["create", "get", "list", "delete"],
    },
    {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["create", "get"]},
    {
        "apiGroups": [""],
        "resources": ["pods"],
        "verbs": ["create", "get", "list", "watch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with PyTorchJobs and a default storage class. Only ada may use the namespaces."""
    folder = tmp_path_factory.mktemp("plane")
    with running(folder, ("ada", "bob"), read_definition(DEFINITION)) as plane:
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        plane.create(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": "nfs", "annotations": default},
                "provisioner": "nfs.csi.k8s.io",
            }
        )
        yield plane


@dataclass(frozen=True)
class Space:
    """A namespace of a test, and the command line in it."""

    name: str
    plane: ControlPlane
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def apply(self, *words: str, user: str = "ada") -> CommandResult:
        """Give a job to kubectl as a user."""
        self.become(user)
        place = ("--to", "kubernetes-yaml", "--namespace", self.name, "--apply", "--yes")
        return run(self.capsys, "train", words[0], *place, *words[1:])

    def become(self, user: str) -> None:
        kubeconfig = self.plane.write_kubeconfig(f"{user}.kubeconfig", user)
        self.monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    def find(self, kind: str) -> list[Manifest]:
        return self.plane.items(kind, self.name)

    def kubectl(self, *words: str) -> str:
        return self.plane.kubectl("-n", self.name, *words)

    def give_volume(self, source: Manifest) -> None:
        """Make a volume for the claim."""
        spec = {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "100Gi"},
            "storageClassName": "nfs",
            **source,
            # Claims of other tests wait as well.
            "claimRef": {"namespace": self.name, "name": "spr-cluster"},
        }
        metadata = {"name": self.name}
        kind = {"apiVersion": "v1", "kind": "PersistentVolume"}
        self.plane.create({**kind, "metadata": metadata, "spec": spec})

    def limit(self, hard: dict[str, str]) -> None:
        """Set a quota, and wait until the cluster has counted."""
        kind = {"apiVersion": "v1", "kind": "ResourceQuota"}
        content = {**kind, "metadata": {"name": "team"}, "spec": {"hard": hard}}
        self.plane.create(content, self.name)
        wait_for(
            "the quota's count",
            lambda: all("used" in each.get("status", {}) for each in self.find("resourcequotas")),
        )


@pytest.fixture
def space(
    plane: ControlPlane,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Space:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:60].rstrip("-")
    plane.kubectl("create", "namespace", name)
    rbac = {"apiVersion": f"{_RBAC}/v1", "metadata": {"name": "trainer"}}
    plane.create({**rbac, "kind": "Role", "rules": RULES}, name)
    subject = {"kind": "User", "name": "ada", "apiGroup": _RBAC}
    role = {"kind": "Role", "name": "trainer", "apiGroup": _RBAC}
    plane.create({**rbac, "kind": "RoleBinding", "subjects": [subject], "roleRef": role}, name)
    wait_for(
        "the service account",
        lambda: any("secrets" in each for each in plane.items("serviceaccounts", name)),
    )
    monkeypatch.setenv("PATH", f"{BINARIES}:{os.environ['PATH']}")
    return Space(name, plane, capsys, monkeypatch)
