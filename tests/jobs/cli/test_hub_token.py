"""``--env HF_TOKEN``: where the login comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.cli.train import build_request
from jobs.train.trackers import find_hub_token
from jobs.train.train import plan_training
from provision.stacks.load import load_stack
from tests.jobs.context import NOW, parse_request


def test_the_environment_comes_before_the_login_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-file\n")
    home = {"HF_HOME": str(tmp_path)}

    assert find_hub_token(home) == "of-the-file"
    assert find_hub_token({"HF_TOKEN_PATH": str(tmp_path / "token")}) == "of-the-file"
    assert find_hub_token({**home, "HUGGING_FACE_HUB_TOKEN": "older"}) == "older"
    assert find_hub_token({**home, "HUGGING_FACE_HUB_TOKEN": "older", "HF_TOKEN": "new"}) == "new"
    with pytest.raises(UsageError, match=r"no Hugging Face login here\n  → hf auth login"):
        find_hub_token({"HF_HOME": str(tmp_path / "none")})


def test_env_without_a_value_takes_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("mine\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def read(*words: str) -> tuple[tuple[str, ...], bool]:
        request = parse_request("train", "squad", "--demo", *(f"--env={word}" for word in words))
        return request.read_variables(), build_request(request, NOW).hub_token

    assert read("A=1", "HF_TOKEN") == (("A=1", "HF_TOKEN=mine"), True)
    assert read("HF_TOKEN=other") == (("HF_TOKEN=other",), False)


@pytest.mark.parametrize("place", ["hub:team/model-1.5", "s3://bucket/models"])
def test_the_nodes_send_the_model_to_the_hub_with_the_login(place: str) -> None:
    words = ("--demo", "--push-to", place, "--env", "HF_TOKEN=mine")
    request = parse_request("train", "classify", *words)
    plan = plan_training(build_request(request, NOW), load_stack("upstream"))
    on_hub = place.startswith("hub:")
    assert json.loads(plan.argv[1])["push_to"] == (place if on_hub else None)
    assert request.pushes is not on_hub
    assert plan.variables == ("HF_TOKEN=mine",)
    assert ("HF_HUB_OFFLINE" in plan.env) is not on_hub
