"""A real Kubernetes control plane on loopback: etcd, API server, scheduler, and some controllers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from infra.wait import wait_until
from jobs.places.kubernetes.manifests import Manifest
from tests.jobs.worker.training.test_run import free_port

BINARIES = (
    Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    / "spr-cluster"
    / "kubernetes-1.20.2"
    / "bin"
)
PROGRAMS = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"),
    "pause",
    *("containerd", "containerd-shim-runc-v2", "ctr", "bridge", "host-local", "loopback"),
)
ADMIN = "admin"
NODE = "worker0"
_CONTROLLERS = (
    "garbagecollector,namespace,nodelifecycle,persistentvolume-binder,pvc-protection,resourcequota,"
    "serviceaccount,serviceaccount-token"
)
_STOP_S = 15.0


def wait_for(what: str, probe: Callable[[], bool], deadline_s: float = 60.0) -> None:
    wait_until(
        what,
        lambda: probe() or None,
        deadline_s=deadline_s,
        every_s=0.2,
    )


@dataclass(frozen=True)
class ControlPlane:
    """Where the API answers; users are contexts of one kubeconfig, with the name as their token."""

    folder: Path
    users: tuple[str, ...]
    port: int = field(default_factory=free_port)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def kubelet_client(self) -> tuple[Path, Path]:
        """The certificate and key with which the API server calls a kubelet."""
        return self.folder / "kubelet-client.crt", self.folder / "kubelet-client.key"

    def kubectl(self, *words: str, stdin: str = "") -> str:
        """Return what kubectl prints for the administrator."""
        done = self._call(words, stdin)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def answers(self, *words: str) -> bool:
        """Return whether kubectl succeeds."""
        return self._call(words).returncode == 0

    def create(self, manifest: Manifest, namespace: str = "default") -> None:
        self.kubectl("create", "-f", "-", "-n", namespace, stdin=json.dumps(manifest))

    def items(self, kind: str, namespace: str) -> list[Manifest]:
        found: list[Manifest] = json.loads(
            self.kubectl("get", kind, "-n", namespace, "--output=json")
        )["items"]
        return found

    def _call(self, words: tuple[str, ...], stdin: str = "") -> subprocess.CompletedProcess[str]:
        argv = [str(BINARIES / "kubectl"), f"--kubeconfig={self.kubeconfig}", *words]
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)

    def write_files(self) -> None:
        """Write tokens, keys, and the kubeconfig."""
        rows = [f'{user},{user},{user},"ml"' for user in self.users]
        rows.append(f'{NODE},system:node:{NODE},{NODE},"system:nodes"')
        tokens = "\n".join([f'{ADMIN},{ADMIN},{ADMIN},"system:masters"', *rows])
        (self.folder / "tokens.csv").write_text(f"{tokens}\n")
        key = ["openssl", "genrsa", "-out", str(self.folder / "accounts.key"), "2048"]
        certificate, own = map(str, self.kubelet_client)
        client = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=plane"]
        for words in (key, [*client, "-days", "2", "-keyout", own, "-out", certificate]):
            subprocess.run(words, check=True, capture_output=True)
        self.write_kubeconfig("kubeconfig", ADMIN)

    def write_kubeconfig(self, name: str, context: str) -> Path:
        """Write a kubeconfig with all users, and one's context as the current one."""
        # The server makes this certificate when it starts.
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": str(self.folder / "certs" / "apiserver.crt"),
        }
        names = (ADMIN, *self.users, NODE, "stranger")
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": name}} for name in names],
            "contexts": [
                {"name": name, "context": {"cluster": "real", "user": name}} for name in names
            ],
        }
        path = self.folder / name
        path.write_text(yaml.safe_dump(content))
        return path

    def etcd(self) -> tuple[list[str], str]:
        """Return etcd's command, and its address."""
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        words = ["etcd", f"--data-dir={self.folder / 'etcd'}", f"--initial-cluster=default={peer}"]
        words += [f"--{kind}-client-urls={client}" for kind in ("listen", "advertise")]
        words += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        return words, client

    def api_server(self, etcd: str) -> list[str]:
        key = self.folder / "accounts.key"
        return [
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={self.folder / 'certs'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={self.kubelet_client[0]}",
            f"--kubelet-client-key={self.kubelet_client[1]}",
        ]

    def controllers(self) -> list[str]:
        key = f"--service-account-private-key-file={self.folder / 'accounts.key'}"
        return self._client("kube-controller-manager", f"--controllers={_CONTROLLERS}", key)

    def scheduler(self) -> list[str]:
        return self._client("kube-scheduler")

    def _client(self, *words: str) -> list[str]:
        own = ["--bind-address=127.0.0.1", f"--secure-port={free_port()}", "--port=0"]
        return [*words, f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", *own]


@contextmanager
def running(folder: Path, users: tuple[str, ...], definition: Manifest) -> Iterator[ControlPlane]:
    """Run a control plane that serves a custom resource, and end all of its processes."""
    plane = ControlPlane(folder, users)
    plane.write_files()
    with ExitStack() as stack:
        words, etcd = plane.etcd()
        stack.enter_context(_own(folder, words))
        server = stack.enter_context(_own(folder, plane.api_server(etcd)))
        wait_for("the API server", lambda: _is_ready(plane, server))
        plane.create(definition)
        kind = f"{definition['spec']['names']['plural']}.{definition['spec']['group']}"
        wait_for(kind, lambda: plane.answers("get", kind))
        # The garbage collector looks for new kinds when it starts, and then twice a minute.
        for words in (plane.controllers(), plane.scheduler()):
            stack.enter_context(_own(folder, words))
        yield plane


def _is_ready(plane: ControlPlane, server: subprocess.Popen[bytes]) -> bool:
    log = plane.folder / "kube-apiserver.log"
    assert server.poll() is None, f"kube-apiserver ended:\n{log.read_text()[-2000:]}"
    if not (plane.folder / "certs" / "apiserver.crt").exists():
        return False
    # Its own roles are written after it has begun to answer.
    return plane.answers("get", "clusterrole", "system:basic-user")


def _own(folder: Path, words: list[str]) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return program(folder / f"{words[0]}.log", [str(BINARIES / words[0]), *words[1:]])


@contextmanager
def program(log: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with a log in its folder; end it in every case."""
    with (
        log.open("wb") as file,
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=log.parent
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
