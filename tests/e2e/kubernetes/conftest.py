"""A real control plane with PyTorchJobs, and a namespace of it for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs.launchers.kubernetes.api import KubernetesApi
from jobs.launchers.kubernetes.resources import core_path
from kubernetes.client import CoreV1Api

from jobs.launchers.kubernetes.manifests import Manifest
from tests.e2e.kubernetes.control_plane import BINARIES, PROGRAMS, ControlPlane, running, wait_for
from tests.e2e.kubernetes.operator import make_pods
from tests.harness.command_line import CommandResult
from tests.jobs.cli.test_main import run
from tests.jobs.launchers.kubernetes.schemas import DEFINITION, read_definition

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
GROUP = "/apis/kubeflow.org/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
# The role that docs/kubernetes.md asks for, and no more.
RULES = [
    {
        "apiGroups": ["kubeflow.org"],
        "resources": ["pytorchjobs"],
        "verbs": ["create", "get", "list", "delete"],
    },
    {
        "apiGroups": [""],
        "resources": ["persistentvolumeclaims", "pods"],
        "verbs": ["create", "get", "list", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with PyTorchJobs and a default storage class. Only ada may use the namespaces."""
    folder = tmp_path_factory.mktemp("plane")
    with running(folder, ("ada", "bob"), read_definition(DEFINITION)) as plane:
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        found = {"name": "nfs", "annotations": default}
        plane.admin.create(
            "/apis/storage.k8s.io/v1/storageclasses",
            {"metadata": found, "provisioner": "nfs.csi.k8s.io"},
        )
        yield plane


@dataclass(frozen=True)
class Space:
    """A namespace of a test, and the command line in it."""

    name: str
    plane: ControlPlane
    api: KubernetesApi
    """The administrator's."""
    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str, user: str = "ada") -> CommandResult:
        where = ("--namespace", self.name, "--context", user)
        command = ("k8s", *words) if words[0] == "submit" else words
        return run(self.capsys, *command, *where)

    def find(self, plural: str) -> list[Manifest]:
        return self.api.items(core_path(self.name, plural))

    def wait_for_status(self, text: str) -> list[str]:
        """Wait until the job's status says something; return its lines."""
        shown: list[str] = []

        def is_shown() -> bool:
            result = self.run("jobs", "bert")
            assert result.code == 0, result.err
            shown[:] = result.out.splitlines()
            return text in result.out

        wait_for(text, is_shown)
        return shown

    def give_volume(self, source: Manifest) -> None:
        """Make a volume for the claim."""
        volume = {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "100Gi"},
            "storageClassName": "nfs",
            **source,
            # Claims of other tests wait, too.
            "claimRef": {"namespace": self.name, "name": "spr-cluster"},
        }
        found = {"metadata": {"name": self.name}, "spec": volume}
        self.api.create("/api/v1/persistentvolumes", found)

    def make_pods(self) -> None:
        make_pods(self.api, self.api.get(f"{self.jobs}/bert"))

    @property
    def jobs(self) -> str:
        return f"{GROUP}/namespaces/{self.name}/pytorchjobs"

    def limit(self, hard: dict[str, str]) -> None:
        """Set a quota, and wait until the cluster has counted."""
        path = core_path(self.name, "resourcequotas")
        self.api.create(path, {"metadata": {"name": "team"}, "spec": {"hard": hard}})
        wait_for(
            "the quota's count",
            lambda: all("used" in each.get("status", {}) for each in self.api.items(path)),
        )


@pytest.fixture
def space(
    plane: ControlPlane,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Space:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:60].rstrip("-")
    api = plane.admin
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    rbac = f"{RBAC}/namespaces/{name}"
    api.create(f"{rbac}/roles", {"metadata": {"name": "trainer"}, "rules": RULES})
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": "trainer"},
        "subjects": [{"kind": "User", "name": "ada", "apiGroup": group}],
        "roleRef": {"kind": "Role", "name": "trainer", "apiGroup": group},
    }
    api.create(f"{rbac}/rolebindings", binding)
    account = core_path(name, "serviceaccounts", "default")
    wait_for("the service account", lambda: bool((api.find(account) or {}).get("secrets")))
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    return Space(name, plane, api, capsys)


@pytest.fixture
def small_node(plane: ControlPlane) -> Iterator[None]:
    """A node on which nothing runs, and no pod of a job fits."""
    core = CoreV1Api(plane.admin.client)
    has = {"cpu": "8", "memory": "32Gi", "pods": "110"}
    content = {"metadata": {"name": "small"}, "status": {"capacity": has, "allocatable": has}}
    plane.admin.create("/api/v1/nodes", content)
    # The server taints a new node until its kubelet reports.
    core.patch_node("small", {"spec": {"taints": None}})
    yield
    plane.admin.delete("/api/v1/nodes/small")
