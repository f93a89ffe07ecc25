"""``--hub-token``: where the login comes from, and that it is sent as a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.cli.shared.job_options import VariableRequest
from jobs.train.trackers import find_hub_token


def test_the_environment_comes_before_the_login_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-file\n")
    home = {"HF_HOME": str(tmp_path)}

    assert find_hub_token(home) == "of-the-file"
    assert find_hub_token({"HF_TOKEN_PATH": str(tmp_path / "token")}) == "of-the-file"
    assert find_hub_token({**home, "HUGGING_FACE_HUB_TOKEN": "older"}) == "older"
    assert find_hub_token({**home, "HUGGING_FACE_HUB_TOKEN": "older", "HF_TOKEN": "new"}) == "new"


def test_without_a_login_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Hugging Face login") as caught:
        find_hub_token({"HF_HOME": str(tmp_path)})
    assert "hf auth login" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("env", "last"), [((), "HF_TOKEN=mine"), (("HF_TOKEN=other",), "HF_TOKEN=other")]
)
def test_it_is_a_variable_that_env_replaces(
    env: tuple[str, ...], last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    request = VariableRequest(env=env, hub_token=True)

    assert request.read_variables()[-1] == last
