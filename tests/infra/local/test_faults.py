"""The faults file: contents, mistakes, and the effect on calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from tests.cloud.faults import PROFILES, Faults, Quota, parse_faults, read_faults
from tests.cloud.policy import Policy

EVERYTHING = """
seed = 7
profile = "metal"
boot_s = 1.5
visibility_s = 2
[quota]
on_demand_vcpus = 256
spot_vcpus = 0
[spot]
usd_per_hour = 2.5
[[capacity]]
zone = "us-east-1a"
free = 0
[[capacity]]
instance_type = "r7iz.*"
market = "spot"
group = true
free = 3
[[throttle]]
rate = 0.3
[[error]]
action = "CreateImage"
times = 2
[[machine]]
n = 2
fate = "never-boots"
[[machine]]
n = "*"
fate = "stops"
after_s = 4
"""


def test_a_file_with_every_section_is_read() -> None:
    faults = parse_faults(EVERYTHING)
    assert (faults.times.boot_s, faults.times.image_s, faults.times.terminate_s) == (1.5, 60, 5)
    assert faults.quota == Quota(on_demand_vcpus=256, spot_vcpus=0)
    assert [rule.free for rule in faults.capacity] == [0, 3]
    assert faults.machine[1].n == "*"


def test_an_empty_file_has_no_faults() -> None:
    faults = parse_faults("")
    assert faults == Faults()
    assert faults.times == PROFILES["instant"]
    assert faults.quota == Quota(on_demand_vcpus=4096, spot_vcpus=4096)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "profile = 'instan'",
            "profile = 'instan': expected 'instant', 'fast', 'metal' or 'unkind'; did you ",
        ),
        ("boots_s = 1", "unknown key boots_s; did you mean boot_s?"),
        ("boot_s = -1", "boot_s = -1: expected greater than or equal to 0"),
        ("[quota]\nspot_vcpu = 1", "unknown key quota.spot_vcpu; did you mean spot_vcpus?"),
        ("[[capacity]]\nzone = 'a'", "capacity[0].free is missing"),
        ("[[machine]]\nfate = 'dead'", "machine[0].fate = 'dead': expected 'never-boots'"),
        ("[[machine]]\nn = -1\nfate = 'dies'", "machine[0].n = -1: expected a whole number"),
        ("[[machine]]\nn = 'all'\nfate = 'dies'", "machine[0].n = 'all': expected a whole number"),
        ("[[error]]\naction = 'CreateImge'", "did you mean CreateImage?"),
        ("[[error]]\nstatus = 200", "error[0].status = 200: expected greater than or equal to 400"),
        ("[iam]\npolicy = 'p.json'", "iam.policy = 'p.json': expected an absolute path"),
        ("seed = ", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_what_is_valid(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text, "my.toml")
    assert caught.value.message.startswith("my.toml: ")
    assert said in caught.value.message


@pytest.mark.parametrize(
    "policy", [None, "no json", "[]", '{"Statement": 5}', '{"Statement": [{}]}']
)
def test_an_invalid_policy_is_refused(tmp_path: Path, policy: str | None) -> None:
    file, faults = tmp_path / "policy.json", tmp_path / "faults.toml"
    faults.write_text(f'[iam]\npolicy = "{file}"\n')
    if policy is not None:
        file.write_text(policy)
    with pytest.raises(UsageError, match=r"policy\.json: "):
        read_faults(faults)
    file.write_text('{"Statement": []}')
    assert read_faults(faults)[1] == Policy([])
