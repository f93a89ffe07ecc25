"""AWS: regions, and this machine's public address."""

from __future__ import annotations

import io
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from infra.aws.cloud import MissingCredentialsError, find_caller_cidr, open_aws_cloud
from infra.errors import CloudError, UsageError


def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Have this AWS configuration, and no region in the environment."""
    monkeypatch.delenv("AWS_REGION", raising=False)
    (tmp_path / "aws-config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def test_the_region_is_given_or_in_the_environment_or_in_the_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(monkeypatch, tmp_path, "[default]\nregion = eu-north-1\n")
    assert open_aws_cloud(None).region == "eu-north-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert open_aws_cloud(None).region == "eu-central-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert open_aws_cloud(None).region == "eu-west-1"
    for region in ("eu-west-2", "us-gov-west-1"):
        cloud = open_aws_cloud(region)
        assert (cloud.region, cloud.billed, cloud.has_amx) == (region, True, True)
        assert (cloud.endpoint_url, cloud.credentials) == (None, None)
    monkeypatch.setenv("AWS_REGION", "")
    assert open_aws_cloud(None).region == "eu-central-1"


def test_missing_credentials_are_reported_before_a_missing_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(MissingCredentialsError):
        open_aws_cloud(None)


@pytest.mark.parametrize("proxy", ["", "http://proxy.example:3128"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_region_unknown_to_botocore_is_new_or_mistyped(
    monkeypatch: pytest.MonkeyPatch, proxy: str, exists: bool
) -> None:
    asked = []

    def look_up(host: str, *_: object) -> list[str]:
        asked.append(host)
        if not exists:
            raise socket.gaierror
        return ["203.0.113.7"]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("HTTPS_PROXY", proxy)

    if exists or proxy:
        assert open_aws_cloud("us-east-11").region == "us-east-11"
    else:
        with pytest.raises(UsageError, match="'us-east-11'; did you mean us-east-1 ") as caught:
            open_aws_cloud("us-east-11")
        assert "`aws account list-regions`" in str(caught.value)
    # The proxy looks it up, perhaps as nobody else can.
    assert asked == ([] if proxy else ["ec2.us-east-11.amazonaws.com"])


def answer(monkeypatch: pytest.MonkeyPatch, content: bytes | Exception) -> None:
    def open_url(opener: urllib.request.OpenerDirector, *_: Any, **__: Any) -> io.BytesIO:
        used: list[Any] = vars(opener)["handlers"]
        assert not any(isinstance(each, urllib.request.ProxyHandler) for each in used)
        if isinstance(content, Exception):
            raise content
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", open_url)


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>sign in</html>", b"2001:db8::1", b"\xff\xff", urllib.error.URLError("offline")],
)
def test_an_unknown_address_asks_for_ssh_cidr(
    monkeypatch: pytest.MonkeyPatch, content: bytes | Exception
) -> None:
    answer(monkeypatch, b"203.0.113.7\n")
    assert find_caller_cidr() == "203.0.113.7/32"

    answer(monkeypatch, content)
    with pytest.raises(CloudError, match="cannot determine this machine's public address") as it:
        find_caller_cidr()
    assert "--ssh-cidr" in str(it.value)
    assert "proxy" not in str(it.value)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    said = r"(?s)without its proxy, which SSH does not use: .* --jump"
    with pytest.raises(CloudError, match=said):
        find_caller_cidr()
