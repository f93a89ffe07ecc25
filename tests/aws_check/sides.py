"""The two clouds that are compared: the embedded one, in this process, and AWS."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import pytest
from botocore.exceptions import ClientError

from infra.aws.clients import Clients, connect
from infra.aws.cloud import DEFAULT_REGION, open_aws_cloud
from infra.ec2.images import find_ubuntu_image
from infra.ec2.tags import resource_name
from jobs.__main__ import main
from tests.harness.command_line import CommandResult, open_command_line
from tests.infra.local.fakes import Endpoint

# The exit codes after Ctrl-C and SIGTERM.
INTERRUPTED, _TERMINATED = 130, 143
# The names of boto3 that differ from those of :class:`Clients`. EC2 without the SDK's retries.
_CLIENTS = {"ec2": "buyer", "service-quotas": "quotas"}
# Asked in one region only: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
_HOME_REGIONS = {"pricing": "us-east-1"}


class MissingError(Exception):
    """An account has nothing for a check to start from."""


@dataclass
class Side:
    """One cloud: its API, its command line, and what exists there."""

    name: str
    region: str
    clients: Clients
    run: Callable[..., CommandResult]

    def client(self, service: str) -> Any:
        """Return the product's client of a service, or a new one if the product has none."""
        found = getattr(self.clients, _CLIENTS.get(service, service), None)
        return found or self.clients._client(service, region=_HOME_REGIONS.get(service))

    def command(self, *argv: str) -> CommandResult:
        """Run `spr-cluster` in this region of AWS. After Ctrl-C, raises :class:`KeyboardInterrupt`."""
        with pytest.MonkeyPatch.context() as patch:
            # It would end this process, which still has to remove what was made.
            patch.setattr("jobs.cli._exit_at_once", sys.exit)
            result = self.run(*argv, "--cloud", "aws", "--region", self.region)
        if result.code in (INTERRUPTED, _TERMINATED):
            raise KeyboardInterrupt
        return result

    @cached_property
    def subnet(self) -> Any:
        zones: Any = [{"Name": "default-for-az", "Values": ["true"]}]
        return _first(self.clients.ec2.describe_subnets(Filters=zones)["Subnets"], "default subnet")

    @cached_property
    def group_id(self) -> str:
        filters: Any = [
            {"Name": "vpc-id", "Values": [self.subnet["VpcId"]]},
            {"Name": "group-name", "Values": ["default"]},
        ]
        groups = self.clients.ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        return str(_first(groups, "default security group")["GroupId"])

    @cached_property
    def image_id(self) -> str:
        return find_ubuntu_image(self.clients.ssm, self.clients.ec2, "24.04").id

    def machine_of(self, cluster: str) -> Any:
        """Return the running machine of a cluster as EC2 describes it."""
        filters: Any = [
            {"Name": "key-name", "Values": [resource_name(cluster)]},
            {"Name": "instance-state-name", "Values": ["running"]},
        ]
        found = self.clients.ec2.describe_instances(Filters=filters)["Reservations"]
        return _first([i for r in found for i in r["Instances"]], "running machine")


def _first(items: Any, what: str) -> Any:
    if not items:
        raise MissingError(f"no {what} in this region")
    return items[0]


@dataclass(frozen=True)
class Answer:
    """How a cloud answers a call: an error's code, empty if it succeeds, and the HTTP status."""

    code: str
    status: int
    message: str = ""

    def __str__(self) -> str:
        return f"{self.code or 'succeeds'} {self.status}"


def ask(side: Side, service: str, operation: str, parameters: dict[str, Any]) -> Answer:
    """Call an operation by its name in boto3."""
    try:
        answer = getattr(side.client(service), operation)(**parameters)
    except ClientError as error:
        answer = error.response
    found, metadata = answer.get("Error", {}), answer["ResponseMetadata"]
    return Answer(found.get("Code", ""), metadata["HTTPStatusCode"], found.get("Message", ""))


Opener = Callable[[str], AbstractContextManager[Side]]


@contextmanager
def open_embedded(faults: str = "") -> Iterator[Side]:
    """An empty embedded cloud with simulated machines, apart from this user's files and account."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        nowhere = str(Path(folder, "none"))
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, nowhere)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("SPR_CLUSTER_HOME", str(Path(folder, "home")))
        endpoint, log = Endpoint(), logging.getLogger("werkzeug")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with open_command_line(endpoint, Path(folder), patch) as line:
                line.cloud.faults(faults)
                yield Side("embedded", DEFAULT_REGION, endpoint.clients, line.run)
        finally:
            endpoint.close()
            log.setLevel(level)


@contextmanager
def open_aws(region: str) -> Iterator[Side]:
    """AWS, with the credentials of this shell."""
    yield Side("AWS", region, connect(open_aws_cloud(region)), _run)


def _run(*argv: str) -> CommandResult:
    """Run `spr-cluster`; its progress stays visible."""
    out, err = io.StringIO(), _Copy(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


class _Copy(io.StringIO):
    """Text that is also written elsewhere at once."""

    def __init__(self, other: TextIO) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        self._other.flush()
        return super().write(text)
