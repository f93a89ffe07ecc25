"""The faults file: contents, mistakes, and the effect on calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.errors import UsageError
from tests.cloud.faults import PROFILES, ActiveFaults, Faults, Quota, parse_faults, read_faults
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


# Active faults


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "faults.toml"


@pytest.fixture
def active_faults(file: Path) -> ActiveFaults:
    return ActiveFaults(file)


def put(active_faults: ActiveFaults, file: Path, text: str) -> None:
    file.write_text(text)
    # Two writes of the same length look alike within one tick of the file system's clock.
    os.utime(file, ns=(0, len(text)))
    active_faults.refresh()


def test_the_server_follows_the_file_until_it_is_removed(
    active_faults: ActiveFaults, file: Path
) -> None:
    active_faults.refresh()
    assert active_faults.now == Faults()
    put(active_faults, file, "boot_s = 1")
    assert active_faults.now.boot_s == 1
    file.unlink()
    active_faults.refresh()
    assert active_faults.now == Faults()


def test_an_invalid_file_is_logged_and_the_last_valid_one_stays_active(
    active_faults: ActiveFaults, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(active_faults, file, "boot_s = 1")
    put(active_faults, file, "boot_s = broken")
    active_faults.refresh()
    assert active_faults.now.boot_s == 1
    assert [record.message.split(":")[0] for record in caplog.records] == ["faults unchanged"]


def test_error_rules_apply_in_turn(active_faults: ActiveFaults, file: Path) -> None:
    rules = (
        '[[error]]\naction="RunInstances"\nafter=1\ntimes=2\ncode="A"\n'
        '[[error]]\naction="RunInstances"\ntimes=1\nafter=2\ncode="B"\n'
    )
    put(active_faults, file, rules)
    codes = []
    for _ in range(6):
        assert active_faults.find_error("StopInstances") is None
        rule = active_faults.find_error("RunInstances")
        codes.append(rule.code if rule else "")
    assert codes == ["", "A", "A", "", "B", ""]
    put(active_faults, file, rules + "# again\n")
    assert active_faults.find_error("RunInstances") is None
    assert active_faults.find_error("RunInstances") is not None


def test_throttling_follows_the_seed(active_faults: ActiveFaults, file: Path) -> None:
    draws = []
    for text in ("seed = 3", "seed = 3 ", "seed = 40"):
        put(active_faults, file, text + '\n[[throttle]]\naction = "StopInstances"\nrate = 0.3\n')
        draws.append([active_faults.is_throttled("StopInstances") for _ in range(200)])
    assert draws[0] == draws[1] != draws[2]
    assert 30 < sum(draws[0]) < 90
    assert not any(active_faults.is_throttled("RunInstances") for _ in range(50))


def test_a_new_file_restarts_the_count_of_machines(active_faults: ActiveFaults, file: Path) -> None:
    put(active_faults, file, "[[machine]]\nn = 1\nfate = 'dies'\n[[machine]]\nfate = 'stops'\n")
    fates = [active_faults.next_fate() for _ in range(3)]
    assert [rule.fate for rule in fates if rule] == ["stops", "dies", "stops"]
