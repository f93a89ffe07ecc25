"""The faults file: what it may say, how a mistake is answered, and what it makes of calls."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.local.faults import PROFILES, ActiveFaults, Faults, Quota, parse_faults, read_faults
from infra.local.state import StateFolder
from jobs.cli import main

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
def in_force(file: Path) -> ActiveFaults:
    return ActiveFaults(file)


def put(in_force: ActiveFaults, file: Path, text: str) -> None:
    file.write_text(text)
    # Two writes within one tick of the file system's clock, of the same length, look alike.
    os.utime(file, ns=(0, len(text)))
    in_force.refresh()


def test_the_file_is_followed_and_its_end_ends_the_faults(
    in_force: ActiveFaults, file: Path
) -> None:
    in_force.refresh()
    assert in_force.now == Faults()
    put(in_force, file, "boot_s = 1")
    assert in_force.now.boot_s == 1
    file.unlink()
    in_force.refresh()
    assert in_force.now == Faults()


def test_a_broken_file_is_logged_and_the_last_good_one_stays(
    in_force: ActiveFaults, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(in_force, file, "boot_s = 1")
    put(in_force, file, "boot_s = broken")
    in_force.refresh()
    assert in_force.now.boot_s == 1
    assert [record.message.split(":")[0] for record in caplog.records] == ["faults unchanged"]


def test_errors_come_when_they_are_due_and_one_after_the_other(
    in_force: ActiveFaults, file: Path
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


def test_throttling_follows_the_seed(in_force: ActiveFaults, file: Path) -> None:
    draws = []
    for text in ("seed = 3", "seed = 3 ", "seed = 40"):
        put(in_force, file, text + '\n[[throttle]]\naction = "StopInstances"\nrate = 0.3\n')
        draws.append([in_force.is_throttled("StopInstances") for _ in range(200)])
    assert draws[0] == draws[1] != draws[2]
    assert 30 < sum(draws[0]) < 90
    assert not any(in_force.is_throttled("RunInstances") for _ in range(50))


def test_machines_are_counted_from_the_file_on(in_force: ActiveFaults, file: Path) -> None:
    put(in_force, file, "[[machine]]\nn = 1\nfate = 'dies'\n[[machine]]\nfate = 'stops'\n")
    fates = [in_force.next_fate() for _ in range(3)]
    assert [rule.fate for rule in fates if rule] == ["stops", "dies", "stops"]


# `spr-cluster local faults`: no server, no podman


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "bad-day.toml"


def test_a_file_is_put_in_force_shown_and_cleared(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_force = StateFolder.of_user().faults
    assert main(["local", "faults"]) == 0
    assert capsys.readouterr().out == "No faults: everything works, at once.\n"

    user_file.write_text('profile = "metal"\nboot_s = 1.5\n')
    assert main(["local", "faults", str(user_file)]) == 0
    shown = f'# active: {in_force}\nprofile = "metal"\nboot_s = 1.5\n'
    assert capsys.readouterr().out == shown
    assert main(["local", "faults", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(in_force)
    assert [told["values"][name] for name in ("boot_s", "image_s", "seed")] == [1.5, 60, 0]

    assert main(["local", "faults", "--clear"]) == 0
    assert not in_force.exists()


def test_a_wrong_file_is_refused_and_changes_nothing(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_text("seed = 1\n")
    assert main(["local", "faults", str(user_file)]) == 0
    for text in ("sed = 2\n", "seed ="):
        user_file.write_text(text)
        assert main(["local", "faults", str(user_file)]) == 2
    assert main(["local", "faults", str(user_file.with_name("nowhere.toml"))]) == 2
    assert "unknown key sed; did you mean seed?" in capsys.readouterr().err
    assert StateFolder.of_user().faults.read_text() == "seed = 1\n"


def test_a_broken_file_in_force_is_told(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = StateFolder.of_user()
    folder.create()
    folder.faults.write_text("boot_s = 'soon'\n")
    assert main(["local", "faults"]) == 2
    assert "boot_s = 'soon': expected" in capsys.readouterr().err
