"""The faults file: a mistake in one would make a test prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from tests.cloud.faults import parse_faults, read_faults


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("boots_s = 1", "unknown key boots_s; did you mean boot_s?"),
        ("[quota]\nspot_vcpu = 1", "unknown key quota.spot_vcpu; did you mean spot_vcpus?"),
        ("[[machine]]\nfate = 'dead'", "machine[0].fate = 'dead': expected 'never-boots'"),
        ("[[error]]\naction = 'CreateImge'", "did you mean CreateImage?"),
    ],
)
def test_a_mistake_is_named_with_what_is_valid(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text, "my.toml")
    assert caught.value.message.startswith("my.toml: ")
    assert said in caught.value.message


@pytest.mark.parametrize("policy", ["no json", '{"Statement": [{}]}'])
def test_an_invalid_policy_is_refused(tmp_path: Path, policy: str) -> None:
    file, faults = tmp_path / "policy.json", tmp_path / "faults.toml"
    faults.write_text(f'[iam]\npolicy = "{file}"\n')
    file.write_text(policy)
    with pytest.raises(UsageError, match=r"policy\.json: "):
        read_faults(faults)
