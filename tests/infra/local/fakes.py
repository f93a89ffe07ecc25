"""podman as a dictionary, and the embedded cloud's server on top of it, in this process."""

from __future__ import annotations

import ipaddress
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moto.ec2.models import ec2_backends
from werkzeug.serving import make_server

from infra.clients import Clients, connect
from infra.cloud import Cloud
from infra.errors import CloudError
from infra.local.base_image import REPOSITORY, BaseImage
from infra.local.engine import Container, ContainerSpec, Engine, EngineNetwork
from infra.local.nodes import Nodes
from infra.local.server import Application
from infra.local.state import StateFolder

BASE = BaseImage(f"{REPOSITORY}:0123456789abcdef", "embedded base, Debian 12")


class FakeEngine(Engine):
    """Keeps what podman would; a call that no test foresaw fails."""

    def __init__(self) -> None:
        self.specs: dict[str, ContainerSpec] = {}
        self.state: dict[str, Container] = {}
        self.image_names: set[str] = {BASE.reference}
        self.network_list: list[EngineNetwork] = []
        self.copied: list[str] = []
        self.pruned: list[str] = []
        self.refuse: str = ""
        """Start of the name of the operation that fails."""
        self.copy_gate = threading.Event()
        self.copy_gate.set()
        self._pids = itertools.count(1000)

    def call(self, *arguments: str, timeout_s: float = 0, stdin: Any = None) -> str:
        raise AssertionError(f"unexpected: podman {' '.join(arguments)}")

    def _enter(self, operation: str) -> None:
        if self.refuse and operation.startswith(self.refuse):
            raise CloudError(f"podman {operation}: refused", code="InternalError")

    def run(self, spec: ContainerSpec) -> None:
        self._enter(f"run {spec.address}")
        known = (
            spec.image.is_dir() if isinstance(spec.image, Path) else spec.image in self.image_names
        )
        assert known, f"podman run: no such image {spec.image}"
        self.specs[spec.name] = spec
        self.state[spec.name] = Container(spec.name, False, 0, 0, dict(spec.labels))
        self.start(spec.name)

    def start(self, name: str) -> None:
        self._enter("start")
        self.state[name] = replace(self.state[name], running=True, pid=next(self._pids))

    def stop(self, name: str) -> None:
        self._enter("stop")
        self.end(name, 130)

    def end(self, name: str, exit_code: int) -> None:
        """The container's first process ends."""
        self.state[name] = replace(self.state[name], running=False, pid=0, exit_code=exit_code)

    def remove(self, names: Iterable[str]) -> None:
        self._enter("rm")
        for name in names:
            self.state.pop(name, None)
            self.specs.pop(name, None)

    def containers(self, label: str) -> list[Container]:
        key, _, value = label.partition("=")
        return [c for c in self.state.values() if c.labels.get(key) == value]

    def is_alive(self, pid: int) -> bool:
        return any(c.pid == pid for c in self.state.values())

    def copy_disk(self, container: str, target: Path) -> None:
        self._enter("copy")
        assert self.copy_gate.wait(10)
        assert self.state[container].running
        self.copied.append(container)
        target.mkdir(parents=True)

    def images(self, reference: str) -> list[str]:
        stem = reference.removesuffix("*")
        match = str.startswith if reference.endswith("*") else str.__eq__
        return sorted(name for name in self.image_names if match(name, stem))

    def remove_image(self, image: str) -> None:
        self._enter("rmi")
        assert image not in {spec.image for spec in self.specs.values()}, "image is in use"
        self.image_names.discard(image)

    def prune_images(self, label: str) -> None:
        self.pruned.append(label)

    def networks(self) -> list[EngineNetwork]:
        return list(self.network_list)

    def create_network(
        self, name: str, subnet: str, gateway: str, labels: Mapping[str, str]
    ) -> None:
        self.network_list.append(
            EngineNetwork(name, (ipaddress.IPv4Network(subnet),), dict(labels))
        )

    def remove_networks(self, names: Sequence[str]) -> None:
        self.network_list = [n for n in self.network_list if n.name not in names]

    def backend(self) -> str:
        return "netavark"


@dataclass
class FakeCloud:
    """The embedded cloud without podman: real HTTP on loopback, moto, and a fake engine."""

    folder: StateFolder
    engine: FakeEngine
    endpoint: Endpoint
    application: Application

    @property
    def clients(self) -> Clients:
        return self.endpoint.clients

    @property
    def backend(self) -> Any:
        return self.application._regions["us-east-1"]

    def run(self, count: int = 1, **wishes: Any) -> list[str]:
        """Start instances; returns their ids."""
        request: dict[str, Any] = {
            "ImageId": BASE.ami_id,
            "InstanceType": "r7iz.metal-16xl",
            "MinCount": count,
            "MaxCount": count,
            **wishes,
        }
        return [i["InstanceId"] for i in self.clients.ec2.run_instances(**request)["Instances"]]

    def describe(self, instance_id: str) -> Any:
        answer = self.clients.ec2.describe_instances(InstanceIds=[instance_id])
        return answer["Reservations"][0]["Instances"][0]

    def state_of(self, instance_id: str) -> str:
        return str(self.describe(instance_id)["State"]["Name"])

    def container(self, instance_id: str) -> str:
        return f"spr-{self.folder.key}-{instance_id}"

    def spec(self, instance_id: str) -> ContainerSpec:
        return self.engine.specs[self.container(instance_id)]


class Endpoint:
    """One loopback port and one set of clients for all tests, since both are slow to make.

    Whichever embedded cloud a test has last opened answers there.
    """

    def __init__(self) -> None:
        self.application: Any = None
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self.clients = connect(
            Cloud(
                name="local",
                region="us-east-1",
                caller_cidr=lambda: "172.31.0.1/32",
                default_stack="upstream",
                billed=False,
                has_amx=False,
                endpoint_url=self.url,
                credentials=("embedded", "embedded"),
            )
        )

    def _answer(self, environ: Any, start_response: Any) -> Any:
        return self.application(environ, start_response)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def serve(
        self, folder: StateFolder, engine: FakeEngine, *, suspended: bool = False
    ) -> Iterator[FakeCloud]:
        """Start the server's application as the server itself does, less the process."""
        ec2_backends.clear()
        folder.create()
        application = Application(Nodes(engine, folder, BASE), folder)
        application.load(suspended=suspended)
        application.open_region("us-east-1")
        outer, self.application = self.application, application
        try:
            yield FakeCloud(folder, engine, self, application)
        finally:
            self.application = outer
            ec2_backends.clear()


def state_folder(root: Path) -> StateFolder:
    return StateFolder(root / ".local-cloud")
