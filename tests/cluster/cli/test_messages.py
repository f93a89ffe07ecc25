"""Messages for requests that can't be met: the whole message, and nothing done.

``golden/usage.txt`` has each command line and what it prints, word for word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.aws.cloud import open_aws_cloud
from tests.golden import check_section, read_sections
from tests.harness import failures as f
from tests.harness.command_line import CommandLine
from tests.infra.local.fakes import Endpoint

_USAGE = Path(__file__).parent / "golden" / "usage.txt"
_CREDENTIALS = _USAGE.with_name("credentials.txt")
# What no line of a file holds as it is.
_UNSEEN = {"<0x01>": "\x01", "<newline>": "\n"}
_YES = re.compile(
    r"this needs confirmation, but there is no terminal: \$13\.20 an hour, at most \$113\.2\d "
    r"\(Price List API, [\d-]{10}\)\n  → --yes confirms"
)


@pytest.fixture(scope="module")
def line(endpoint: Endpoint) -> Iterator[CommandLine]:
    with f.one_for_all(endpoint) as line:
        yield line


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("argv", read_sections(_USAGE))
def test_a_usage_error_names_what_is_expected(line: CommandLine, argv: str) -> None:
    words = argv
    for shown, text in _UNSEEN.items():
        words = words.replace(shown, text)

    message = f.refuse(line, shlex.split(words))

    # Some versions of Python put quotes around choices.
    choices = re.sub(r"(?<=choose from ).*(?=\)\n)", lambda m: m[0].replace("'", ""), message)
    check_section(_USAGE, argv, choices)


def test_without_a_terminal_a_purchase_needs_yes(line: CommandLine) -> None:
    message = f.refuse(line, ["up", "--nodes", "2"])
    assert _YES.fullmatch(message), message


@pytest.mark.parametrize(
    "verb",
    [
        "up --yes",
        "up --dry-run",
        "status --cloud aws",
        "down --yes --region us-east-1",
        "list --cloud aws",
        "gc",
    ],
)
def test_missing_credentials_are_reported_by_every_command(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(line, "open_cloud", lambda name, region, _: open_aws_cloud(region))
    monkeypatch.setattr("infra.aws.cloud.find_caller_cidr", lambda: "203.0.113.7/32")
    check_section(_CREDENTIALS, "missing", f.refuse(line, verb.split()))
    if verb == "gc":  # nobody expects clusters where no account is set up
        listed = line.must("list")
        assert listed.out == "No clusters were made on this machine.\n"
        assert "aws was not searched: no AWS credentials found" in listed.err


def test_a_missing_profile_is_named(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    message = f.refuse(line, ["status"])
    expected = r"AWS configuration can't be used: .*\(work\).*\n.*`aws configure --profile work`.*"
    assert re.fullmatch(expected, message), message


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("ExpiredToken", "The security token included in the request is expired"),
        ("AuthFailure", "AWS was not able to validate the provided access credentials"),
    ],
)
def test_rejected_credentials_are_reported(line: CommandLine, code: str, text: str) -> None:
    line.cloud.faults(f"[[error]]\ncode = '{code}'\nmessage = '{text}'\ntimes = 100\n")
    try:
        check_section(_CREDENTIALS, code, f.refuse(line, ["up", "--nodes", "2", "--yes"]))
    finally:
        line.cloud.faults("")
