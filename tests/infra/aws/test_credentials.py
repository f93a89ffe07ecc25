"""Credentials that can't be used: one line, and the very command that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.aws.cloud import open_session
from infra.errors import UsageError

GOOD = '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "s"}'


@pytest.mark.parametrize(
    ("bad", "text", "hint"),
    [
        ("credential_process = /bin/echo {}", "Unsupported version", "credential_process"),
        ("credential_process = /bin/echo []", "cannot use", "credential_process"),
        ("credential_process = /bin/echo Password:", "cannot use", "credential_process"),
        ("credential_process = /none/helper", "/none/helper", "credential_process"),
        ("credential_process = /bin/sh -c 'exit 3'", "cannot use", "credential_process"),
        ("role_arn = arn:aws:iam::1:role/x\nsource_profile = b", '"b"', "correct the prof"),
    ],
)
def test_a_profile_that_cant_be_used_is_mended_as_the_hint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, text: str, hint: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "a")

    config.write_text(f"[profile a]\nregion = us-east-1\n{bad}\n")
    with pytest.raises(UsageError) as caught:
        open_session()
    assert text in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in str(caught.value.hint)

    good = f"credential_process = /bin/echo '{GOOD}'"
    config.write_text(f"[profile a]\nregion = us-east-1\n{good}\n")
    open_session()
