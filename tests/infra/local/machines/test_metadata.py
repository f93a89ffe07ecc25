"""The instance metadata of a container: the script that systemd runs for each request, in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from infra.local.machines.containers import Seed, write_metadata
from infra.local.machines.podman import HOOKS
from tests.provision.machine import Machine

Ask = Callable[..., tuple[int, str]]
TOKEN = "/latest/api/token"
ZONE = "/latest/meta-data/placement/availability-zone"


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    folder = tmp_path / "machine/root/var/lib/cloud/seed/nocloud"
    values = {"instance-id": "i-1", "placement/availability-zone": "us-east-1a"}
    Machine.make(tmp_path / "machine")
    Seed("i-1", "ip-10-0-0-1", "", b"", values).write(folder)
    return folder


@pytest.fixture
def ask(tmp_path: Path, seed: Path) -> Ask:
    machine = Machine(tmp_path / "machine")
    script = resources.files("infra.local.machines").joinpath("base/metadata.sh").read_text()

    def ask_(method: str, path: str, **headers: str) -> tuple[int, str]:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        request = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""])
        done = machine.shell(f"printf '%s' \"$1\" | ({script}\n)", request, program="bash")
        head, _, body = done.stdout.partition("\n\n")
        assert done.stderr == ""
        assert f"Content-Length: {len(body)}\n" in f"{head}\n"
        return int(head.split()[1]), body

    return ask_


def token_of(ask: Ask) -> str:
    status, token = ask("PUT", TOKEN, X_aws_ec2_metadata_token_ttl_seconds="60")
    assert status == 200
    return token


def test_nothing_is_answered_without_a_token(ask: Ask) -> None:
    assert ask("GET", ZONE) == (401, "")
    for token in ("guessed", "../../etc/passwd"):
        assert ask("GET", ZONE, X_aws_ec2_metadata_token=token) == (401, "")
    given = {"X_Forwarded_For": "10.0.0.9", "X_aws_ec2_metadata_token_ttl_seconds": "60"}
    assert ask("PUT", TOKEN, **given) == (403, ""), "a proxy"
    for seconds in ("", "0", "21601", "1000000", "-5", "1h"):
        assert ask("PUT", TOKEN, X_aws_ec2_metadata_token_ttl_seconds=seconds) == (400, "")


def test_values_folders_and_what_there_is_not(ask: Ask, seed: Path) -> None:
    headers = {"x_aws_ec2_METADATA_token": token_of(ask)}
    assert ask("GET", ZONE, **headers) == (200, "us-east-1a")
    assert ask("GET", "/latest/meta-data/", **headers) == (200, "instance-id\nplacement/")
    notice = "/latest/meta-data/spot/instance-action"
    assert ask("GET", notice, **headers) == (404, "")
    text = json.dumps({"action": "terminate", "time": "2026-11-22T18:30:00Z"})
    write_metadata(seed, "spot/instance-action", text)
    assert ask("GET", notice, **headers) == (200, text)
    assert ask("GET", "/latest/../../user-data", **headers) == (404, "")
    assert ask("POST", ZONE, **headers)[0] == 405


def test_a_token_expires(ask: Ask, tmp_path: Path) -> None:
    token = token_of(ask)
    (tmp_path / "machine/root/run/embedded-cloud-tokens" / token).write_text("1\n")
    assert ask("GET", ZONE, X_aws_ec2_metadata_token=token) == (401, "")


def test_the_address_belongs_to_the_container_alone() -> None:
    (hook,) = [json.loads(path.read_text()) for path in HOOKS.iterdir()]
    assert hook["stages"] == ["createContainer"], "in the container's own network"
    assert hook["hook"]["args"][3:] == ["169.254.169.254/32", "dev", "lo", "scope", "host"]
