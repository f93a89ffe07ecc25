"""The faults file: what it may say, how a mistake is answered, and what it makes of calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.local.faults import PROFILES, Faults, Quota, parse_faults, read_faults
from infra.local.faults_in_force import FaultsInForce

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


def test_a_file_that_says_everything() -> None:
    faults = parse_faults(EVERYTHING)
    assert (faults.times.boot_s, faults.times.image_s, faults.times.terminate_s) == (1.5, 60, 5)
    assert faults.quota == Quota(on_demand_vcpus=256, spot_vcpus=0)
    assert [rule.free for rule in faults.capacity] == [0, 3]
    assert faults.machine[1].n == "*"


def test_an_empty_file_is_a_perfect_day() -> None:
    faults = parse_faults("")
    assert faults == Faults()
    assert faults.times == PROFILES["instant"]
    assert faults.quota == Quota(on_demand_vcpus=4096, spot_vcpus=4096)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "profile = 'instan'",
            "profile = 'instan': expected 'instant', 'fast' or 'metal'; did you ",
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
def test_a_mistake_is_named_with_what_fits(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text, "my.toml")
    assert caught.value.message.startswith("my.toml: ")
    assert said in caught.value.message


@pytest.mark.parametrize("policy", [None, "no json", "[]"])
def test_the_policy_must_be_one(tmp_path: Path, policy: str | None) -> None:
    file, faults = tmp_path / "policy.json", tmp_path / "faults.toml"
    faults.write_text(f'[iam]\npolicy = "{file}"\n')
    if policy is not None:
        file.write_text(policy)
    with pytest.raises(UsageError, match=r"IAM policy .*policy\.json"):
        read_faults(faults)
    file.write_text('{"Statement": []}')
    assert read_faults(faults)[1] == '{"Statement": []}'


# In force


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "faults.toml"


@pytest.fixture
def in_force(file: Path) -> FaultsInForce:
    return FaultsInForce(file)


def put(in_force: FaultsInForce, file: Path, text: str) -> None:
    file.write_text(text)
    # Two writes within one tick of the file system's clock, of the same length, look alike.
    os.utime(file, ns=(0, len(text)))
    in_force.refresh()


def test_the_file_is_followed_and_its_end_ends_the_faults(
    in_force: FaultsInForce, file: Path
) -> None:
    in_force.refresh()
    assert in_force.now == Faults()
    put(in_force, file, "boot_s = 1")
    assert in_force.now.boot_s == 1
    file.unlink()
    in_force.refresh()
    assert in_force.now == Faults()


def test_a_broken_file_is_logged_and_the_last_good_one_stays(
    in_force: FaultsInForce, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(in_force, file, "boot_s = 1")
    put(in_force, file, "boot_s = broken")
    in_force.refresh()
    assert in_force.now.boot_s == 1
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "faults stay as they were"
    ]


def test_errors_come_when_they_are_due_and_one_after_the_other(
    in_force: FaultsInForce, file: Path
) -> None:
    rules = (
        '[[error]]\naction="RunInstances"\nafter=1\ntimes=2\ncode="A"\n'
        '[[error]]\naction="RunInstances"\ntimes=1\nafter=2\ncode="B"\n'
    )
    put(in_force, file, rules)
    codes = []
    for _ in range(6):
        assert in_force.find_error("StopInstances") is None
        rule = in_force.find_error("RunInstances")
        codes.append(rule.code if rule else "")
    assert codes == ["", "A", "A", "", "B", ""]
    put(in_force, file, rules + "# again\n")
    assert in_force.find_error("RunInstances") is None
    assert in_force.find_error("RunInstances") is not None


def test_throttling_follows_the_seed(in_force: FaultsInForce, file: Path) -> None:
    draws = []
    for text in ("seed = 3", "seed = 3 ", "seed = 40"):
        put(in_force, file, text + '\n[[throttle]]\naction = "StopInstances"\nrate = 0.3\n')
        draws.append([in_force.is_throttled("StopInstances") for _ in range(200)])
    assert draws[0] == draws[1] != draws[2]
    assert 30 < sum(draws[0]) < 90
    assert not any(in_force.is_throttled("RunInstances") for _ in range(50))


def test_machines_are_counted_from_the_file_on(in_force: FaultsInForce, file: Path) -> None:
    put(in_force, file, "[[machine]]\nn = 1\nfate = 'dies'\n[[machine]]\nfate = 'stops'\n")
    fates = [in_force.next_fate() for _ in range(3)]
    assert [rule.fate for rule in fates if rule] == ["stops", "dies", "stops"]
