"""The embedded cloud in this process: its server on real HTTP, with podman as a dictionary."""

from __future__ import annotations

import ipaddress
import itertools
import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.compat import HAS_CRT
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instances import Instance
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from moto.scheduler.models import scheduler_backends
from moto.servicequotas.models import servicequotas_backends
from werkzeug.serving import make_server

from infra.aws.clients import Clients, connect, error_code
from infra.aws.cloud import Cloud
from infra.errors import CloudError
from infra.files import write_private
from infra.local.api.application import Application
from infra.local.api.runtime import ServerClock
from infra.local.machines.base_image import REPOSITORY, BaseImage
from infra.local.machines.containers import NodeContainers
from infra.local.machines.podman import Container, ContainerSpec, Podman, PodmanNetwork
from infra.local.state import StateFolder
from tests.cloud.application import FaultyApplication, faults_file
from tests.cloud.faults import parse_faults
from tests.fakes import FakeClock

CREDENTIALS = ("embedded", "embedded")
"""Of every embedded cloud here, because all tests share one set of clients."""
BASE = BaseImage(f"{REPOSITORY}:0123456789abcdef", "embedded base, Debian 12")


def leave_moto_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after a test what the embedded cloud changes in moto, and ignore this machine's networks."""
    unchanged = NetworkInterface.check_auto_public_ip
    monkeypatch.setattr(NetworkInterface, "check_auto_public_ip", unchanged)
    monkeypatch.setattr(NetworkInterface, "attachment", NetworkInterface.attachment)
    monkeypatch.setattr(Instance, "public_dns_name", Instance.public_dns_name)
    monkeypatch.setattr("infra.local.api.ec2.used_ranges", list)


class FakeTime(FakeClock):
    """EC2's time and the tool's: both pass only when a caller sleeps."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        super().__init__(now)


class FakePodman(Podman):
    """podman as a dictionary; an unexpected call fails."""

    def __init__(self) -> None:
        self.specs: dict[str, ContainerSpec] = {}
        self.state: dict[str, Container] = {}
        self.image_names: set[str] = {BASE.reference}
        self.network_list: list[PodmanNetwork] = []
        self.copied: list[str] = []
        self.pruned: list[str] = []
        self.keys: tuple[str, ...] = ("ssh-ed25519 AAAAfake root@fake",)
        """The public host keys of every running container."""
        self.refuse: str = ""
        """The operation that fails, by the start of its name."""
        self.copying_allowed = threading.Event()
        self.copying_allowed.set()
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
        """End the container's first process."""
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
        return any(c.running and c.pid == pid for c in self.state.values())

    def copy_disk(self, container: str, target: Path) -> None:
        self._enter("copy")
        assert self.copying_allowed.wait(60)
        assert self.state[container].running
        self.copied.append(container)
        target.mkdir(parents=True)

    def host_keys(self, pid: int, made: str, proc: Path = Path("/proc")) -> tuple[str, ...]:
        return self.keys if self.is_alive(pid) else ()

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

    def networks(self) -> list[PodmanNetwork]:
        return list(self.network_list)

    def create_network(
        self, name: str, subnet: str, gateway: str, labels: Mapping[str, str]
    ) -> None:
        self._enter("network")
        self.network_list.append(
            PodmanNetwork(name, (ipaddress.IPv4Network(subnet),), dict(labels))
        )

    def remove_networks(self, names: Sequence[str]) -> None:
        self.network_list = [n for n in self.network_list if n.name not in names]


@dataclass
class FakeCloud:
    """The embedded cloud with a fake podman: real HTTP on loopback, and moto."""

    folder: StateFolder
    podman: FakePodman
    endpoint: Endpoint
    application: FaultyApplication

    @property
    def clients(self) -> Clients:
        return self.endpoint.clients

    @property
    def ec2(self) -> Any:
        """An EC2 client without the SDK's retries."""
        return self.endpoint.ec2

    @property
    def backend(self) -> Any:
        return self.application._regions["us-east-1"]

    @property
    def clock(self) -> FakeTime:
        assert isinstance(self.application.runtime.clock, FakeTime), "serve(…, clock=FakeTime())"
        return self.application.runtime.clock

    def faults(self, text: str) -> None:
        """Activate a faults file at once; raises :class:`UsageError` if it is invalid."""
        parse_faults(text)
        with self.application.lock:
            write_private(faults_file(self.folder), text)
            self.application.faults.refresh()

    def fate_of(self, instance_id: str) -> str:
        """Return a machine's fate, such as ``no-amx``; empty for most machines."""
        return str(self.backend.lifecycle.fate_of(instance_id))

    def run(self, count: int = 1, **parameters: Any) -> list[str]:
        """Start instances and return their ids."""
        request: dict[str, Any] = {
            "ImageId": BASE.ami_id,
            "InstanceType": "r7iz.metal-16xl",
            "MinCount": count,
            "MaxCount": count,
            **parameters,
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
        return self.podman.specs[self.container(instance_id)]


class Endpoint:
    """One loopback port and one set of clients for all tests, because both are slow to create.

    The embedded cloud that a test opened last answers there.
    """

    def __init__(self) -> None:
        self.application: Any = None
        self._server = make_server("127.0.0.1", 0, self.answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self.ec2 = self.client("ec2")
        self.clients = connect(
            Cloud(
                name="local",
                region="us-east-1",
                caller_cidr=lambda: "172.31.0.1/32",
                billed=False,
                has_amx=False,
                endpoint_url=self.url,
                credentials=CREDENTIALS,
            )
        )

    def client(
        self, service: str, credentials: tuple[str, str] = CREDENTIALS, region: str = "us-east-1"
    ) -> Any:
        """Return a client of any AWS service, without retries."""
        once = Config(retries={"total_max_attempts": 1, "mode": "standard"}, proxies={})
        return boto3.client(
            service,  # type: ignore[call-overload]
            region_name=region,
            endpoint_url=self.url,
            aws_access_key_id=credentials[0],
            aws_secret_access_key=credentials[1],
            config=once,
        )

    def answer(self, environ: Any, start_response: Any) -> Any:
        return self.application(environ, start_response)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def serve(
        self,
        folder: StateFolder,
        podman: FakePodman,
        *,
        suspended: Collection[str] = (),
        clock: ServerClock | None = None,
        saving: bool = True,
        kind: type[Application] = FaultyApplication,
    ) -> Iterator[FakeCloud]:
        """Start the server's application as the server does, without its process.

        Without ``saving``, a test with thousands of calls does not write the state file each time.
        """
        ec2_backends.clear()
        folder.create()
        write_private(folder.credentials_file, " ".join(CREDENTIALS))
        options: Any = {} if saving else {"saving": False}
        application: Any = kind(
            NodeContainers(podman, folder, BASE), folder, clock=clock, **options
        )
        application.load(suspended=suspended)
        application.open_region("us-east-1")
        outer, self.application = self.application, application
        try:
            # What they remember of an earlier test, whose cloud may have another caller.
            self.clients.labels = {}
            vars(self.clients).pop("caller", None)
            yield FakeCloud(folder, podman, self, application)
        finally:
            self.application = outer
            every = (ec2_backends, servicequotas_backends, iam_backends, scheduler_backends)
            for backends in (*every, s3_backends, s3_backends.bucket_accounts):
                backends.clear()


def connect_node(cloud: FakeCloud, profile: str) -> Any:
    """Return S3 with the credentials of the nodes' role."""
    sessions = cloud.application.buckets.sessions
    found = json.loads(sessions.render(profile, "i-1", time.time()))
    return boto3.client(
        "s3",
        endpoint_url=cloud.endpoint.url,
        aws_access_key_id=found["AccessKeyId"],
        aws_secret_access_key=found["SecretAccessKey"],
        aws_session_token=found["Token"],
    )


def sign_at(monkeypatch: pytest.MonkeyPatch, time: datetime) -> None:
    """Have requests signed with this date, in UTC; with awscrt, botocore signs in another module."""

    def now(*, remove_tzinfo: bool = True) -> datetime:
        return time.replace(tzinfo=None) if remove_tzinfo else time

    for module in ("botocore.auth", *(["botocore.crt.auth"] if HAS_CRT else [])):
        monkeypatch.setattr(f"{module}.get_current_datetime", now)


def refused(call: Any, **request: Any) -> tuple[str, int]:
    """Return EC2's error code and HTTP status."""
    with pytest.raises(ClientError) as caught:
        call(**request)
    return error_code(caught.value), caught.value.response["ResponseMetadata"]["HTTPStatusCode"]


def refusal(call: Any, **request: Any) -> str:
    """Return EC2's error code."""
    return refused(call, **request)[0]


def tags(kind: str, **values: str) -> Any:
    """Return the TagSpecifications of one kind of resource."""
    return [{"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in values.items()]}]


def state_folder(root: Path) -> StateFolder:
    return StateFolder(root / ".local-cloud")
