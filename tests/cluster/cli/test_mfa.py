"""A role with MFA: each command has one session, which asks once, however many clients and regions."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import AssumeRoleProvider

from infra.aws.clients import connect, translate_boto_error
from infra.aws.cloud import describe_end, open_aws_cloud
from infra.aws.s3 import connect_s3
from jobs.__main__ import main
from tests.harness.simulated_cloud import SimulatedCloud
from tests.infra.local.fakes import CREDENTIALS

_ACCOUNT = "210987654321"


@pytest.fixture
def asked(cloud: SimulatedCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions for an MFA code. All of AWS is the embedded cloud, through the user's own files."""
    key, secret = CREDENTIALS
    config = (
        f"[profile base]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        f"[profile work]\nsource_profile = base\nrole_arn = arn:aws:iam::{_ACCOUNT}:role/Admin\n"
        "mfa_serial = arn:aws:iam::123456789012:mfa/ann\nregion = us-east-1\n"
    )
    (tmp_path / "aws").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.fake.endpoint.url)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        # The same code for 30 s, as devices show it.
        return "123456"

    monkeypatch.setattr(AssumeRoleProvider.__init__, "__defaults__", (ask, None, None))
    return questions


def test_list_asks_once_for_all_regions_and_later_commands_not_at_all(
    cloud: SimulatedCloud, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for region in ("us-east-1", "eu-west-1"):
        cloud.fake.application.open_region(region, _ACCOUNT)

    assert main(["list", "--all-regions", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["accounts"] == {"aws": _ACCOUNT}
    assert asked == ["Enter MFA code for arn:aws:iam::123456789012:mfa/ann: "]
    assert main(["gc", "--all-regions", "--yes"]) == 0
    assert len(asked) == 1, "the role's credentials are kept, as by the AWS CLI"


@pytest.mark.parametrize("can_keep", [True, False])
def test_s3_does_not_ask_again(asked: list[str], tmp_path: Path, can_keep: bool) -> None:
    if not can_keep:
        (tmp_path / "user").mkdir()
        (tmp_path / "user" / ".aws").write_text("not a folder")
    arn = f"arn:aws:sts::{_ACCOUNT}:assumed-role/Admin/botocore-session-"
    assert connect(open_aws_cloud(None)).caller.arn.startswith(arn)
    if can_keep:
        s3: Any = connect_s3()
        assert s3._request_signer._credentials.get_frozen_credentials().token
    assert len(asked) == 1


def test_a_code_that_was_used_and_a_missing_answer_are_reported(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert connect(open_aws_cloud(None)).caller.account == _ACCOUNT
    for file in (tmp_path / "user" / ".aws" / "cli" / "cache").iterdir():
        file.write_text("{}")  # damaged, so it asks again

    assert main(["list"]) == 2

    assert len(asked) == 2
    message = capsys.readouterr().err
    assert "the profile's role can't be assumed: MultiFactorAuthentication failed" in message
    assert "AWS accepts an MFA code only once: wait for the next one" in message

    def fail(_: str) -> str:
        raise EOFError  # there is no terminal

    monkeypatch.setattr(AssumeRoleProvider.__init__, "__defaults__", (fail, None, None))
    assert main(["list"]) == 2
    assert "a question needs an answer, but there is no terminal" in capsys.readouterr().err


def test_the_end_of_a_session_in_a_long_command_asks_for_the_command_again(
    cloud: SimulatedCloud, asked: list[str]
) -> None:
    opened = open_aws_cloud(None)
    clients = connect(opened)
    assert clients.caller.account == _ACCOUNT
    assert opened.session is not None
    assert describe_end(opened.session).startswith("at ")
    credentials: Any = opened.session.get_credentials()
    credentials._expiry_time = credentials._time_fetcher()

    with pytest.raises(Exception, match="MFA token required") as caught:
        clients.ec2.describe_vpcs()

    explained = str(translate_boto_error(caught.value))
    assert explained.startswith(
        "the session of the role with MFA has expired\n  → run the same command"
    )


def shorten(folder: Path, minutes: int) -> None:
    """Let the role's credentials in the cache end so soon."""
    (file,) = (folder / "user" / ".aws" / "cli" / "cache").iterdir()
    kept = json.loads(file.read_text())
    end = datetime.now(timezone.utc) + timedelta(minutes=minutes)
    kept["Credentials"]["Expiration"] = f"{end:%Y-%m-%dT%H:%M:%SUTC}"
    file.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("argv", "minutes", "asks"),
    [
        (["up", "--nodes", "1", "--ssh-cidr", "203.0.113.7/32"], 40, True),
        (["bake", "--ssh-cidr", "203.0.113.7/32"], 40, True),
        (["repair", "--ssh-cidr", "203.0.113.7/32"], 55, False),
        (["repair", "--ssh-cidr", "203.0.113.7/32", "--dry-run"], 40, False),
    ],
)
def test_a_purchase_asks_before_the_session_ends_in_it(
    cloud: SimulatedCloud,
    asked: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    minutes: int,
    asks: bool,
) -> None:
    assert connect(open_aws_cloud(None)).caller.account == _ACCOUNT
    shorten(tmp_path, minutes)

    assert main([*argv, "--region", "us-east-1"]) == 2

    assert len(asked) == (2 if asks else 1)
    # The device shows the same code as before.
    assert ("MultiFactorAuthentication failed" in capsys.readouterr().err) == asks
