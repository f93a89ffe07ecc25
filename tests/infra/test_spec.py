"""The cluster spec: validation, durations, and instance types."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES, check_type_name, complete_type_name, nearest_type
from infra.spec import LONGEST_TTL, build_spec
from infra.words import parse_duration, render_duration

GOOD: dict[str, Any] = {
    "name": "bert",
    "nodes": 4,
    "stack": "intel",
    "ssh_cidrs": ("203.0.113.7/32",),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes 0: expected a whole number from 1 to 256"),
        ({"nodes": -3}, "--nodes -3: expected a whole number"),
        ({"nodes": 257}, "--nodes 257"),
        ({"name": "Bert"}, "--name Bert: expected at most 32 lowercase letters"),
        ({"name": "../x"}, "--name ../x"),
        ({"name": ""}, "--name '': expected"),
        ({"name": "a" * 33}, "at most 32"),
        ({"name": "bert\n"}, "expected at most 32 lowercase letters"),
        ({"volume_gib": 5}, "--volume-gib 5: expected from 20"),
        ({"volume_throughput": 124}, "--volume-throughput 124: expected from 125 to 2000 MiB/s"),
        ({"volume_iops": 80001}, "--volume-iops 80001: expected from 3000 to 80000 IOPS"),
        ({"volume_init_rate": 99}, "--volume-init-rate 99: expected from 100 to 300 MiB/s"),
        (
            {"volume_iops": 12000, "volume_gib": 20},
            "--volume-iops 12000: at most 10000 with --volume-gib 20 (500 per GiB)",
        ),
        (
            {"volume_throughput": 1000},
            "--volume-throughput 1000: at most 750 with 3000 IOPS\n  → add --volume-iops 4000",
        ),
        ({"ssh_cidrs": ("everywhere",)}, "--ssh-cidr: 'everywhere'"),
        (
            {"ssh_cidrs": ("10.0.0.1/8",)},
            "--ssh-cidr: '10.0.0.1/8' is not an IPv4 or IPv6 range; did you mean 10.0.0.0/8?",
        ),
        ({"ssh_cidrs": ("me",)}, "ranges such as 203.0.113.7/32 or 2001:db8::7/128"),
        ({"ssh_cidrs": ()}, "--ssh-cidr"),
        ({"ttl": timedelta(seconds=1)}, "--ttl 0.01667m: expected from 1m to 30d"),
        ({"ttl": timedelta(days=31)}, "--ttl 31d: expected from 1m to 30d"),
        ({"idle_timeout": timedelta(minutes=4)}, "--idle-timeout 4m: expected from 5m to 30d"),
        ({"max_price": 0}, "--max-price 0: expected US dollars per machine and hour, above 0"),
        ({"max_price": float("nan")}, "--max-price nan: expected US dollars"),
        ({"instance_types": ("r7iz.metal_16xl",)}, "did you mean r7iz.metal-16xl"),
        ({"instance_types": ()}, "--instance-type '': expected 1 to 12 EC2 types"),
        ({"instance_types": tuple(INSTANCE_TYPES)}, "expected 1 to 12 EC2 types separated"),
        ({"node": 1}, "unknown key node; did you mean nodes?"),
    ],
)
def test_invalid_options_are_refused_with_the_option_the_value_and_what_was_expected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_spec(**{**GOOD, **options})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_type_that_is_named_twice_is_tried_once() -> None:
    names = ("m7i.metal-24xl", "r7iz.metal-16xl", "m7i.metal-24xl")

    spec = build_spec(**GOOD, instance_types=names)

    assert spec.instance_types == ("m7i.metal-24xl", "r7iz.metal-16xl")


def test_a_gpu_type_is_refused_as_one() -> None:
    with pytest.raises(UsageError, match=r"^p4d\.24xlarge: p4d is a GPU type; .* CPUs with AMX\n"):
        check_type_name("p4d.24xlarge")


def test_what_can_be_no_type_offers_near_names_and_families_with_amx() -> None:
    with pytest.raises(UsageError) as caught:
        check_type_name("m7i.metal_24xl")
    assert "did you mean m7i.metal-24xl" in caught.value.message
    assert caught.value.hint is not None
    assert "families with AMX: r7iz, " in caught.value.hint
    assert "c6i" not in caught.value.hint


@pytest.mark.parametrize(
    ("text", "hours"), [("8h", 8), ("90m", 1.5), ("2d", 48), ("0.5h", 0.5), (" 1h ", 1)]
)
def test_duration(text: str, hours: float) -> None:
    assert parse_duration(text, "--ttl") == timedelta(hours=hours)


@pytest.mark.parametrize(
    "text", ["", "8", "h", "-1h", "8 hours", "1w", "1h30m", "٣h", "1e3h", "nanh"]
)
def test_a_wrong_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--ttl .* such as 90m, 8h, or 2d$"):
        parse_duration(text, "--ttl")


def test_a_duration_beyond_all_time_is_too_long() -> None:
    with pytest.raises(UsageError, match="expected at most 30d"):
        parse_duration("9" * 400 + "d", "--ttl")


@given(st.integers(1, int(LONGEST_TTL.total_seconds() // 60)))
def test_a_duration_is_read_as_it_was_written(minutes: int) -> None:
    time = timedelta(minutes=minutes)

    assert parse_duration(render_duration(time), "--ttl") == time


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(60, "1h"), (90, "90m"), (1440, "1d"), (1500, "25h"), (0.5, "0.5m"), (43_199.5, "43199.5m")],
)
def test_a_duration_is_written_in_its_largest_whole_unit(minutes: float, text: str) -> None:
    assert render_duration(timedelta(minutes=minutes)) == text


def test_the_catalogue_is_sane() -> None:
    for entry in INSTANCE_TYPES.values():
        assert entry.vcpus == 2 * entry.cores or entry.name.startswith(("c8i", "m8i", "r8i"))
        assert entry.table_usd is None or entry.table_usd > 0.04 * entry.vcpus - 0.01


def test_a_proxys_url_has_a_port_and_no_login() -> None:
    spec = build_spec(ssh_cidrs=("10.0.0.0/8",), proxy="http://proxy.corp.example:3128/")
    assert spec.proxy == "http://proxy.corp.example:3128"
    assert build_spec(ssh_cidrs=("10.0.0.0/8",), proxy="none").proxy is None
    with pytest.raises(UsageError, match="readable in the cluster's tags") as caught:
        build_spec(ssh_cidrs=("10.0.0.0/8",), proxy="http://me:secret@proxy:3128")
    assert "secret" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "url", ["proxy:3128", "https://proxy:3128", "http://proxy", "http://proxy:0", "http://a b:1"]
)
def test_other_proxies_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected http://HOST:PORT"):
        build_spec(ssh_cidrs=("10.0.0.0/8",), proxy=url)


_METAL = sorted({name.partition(".")[0] for name in INSTANCE_TYPES if ".metal-" in name})


@pytest.mark.parametrize("family", _METAL)
def test_metal_without_a_size_is_the_familys_smallest(family: str) -> None:
    sizes = [kind for kind in INSTANCE_TYPES.values() if kind.name.startswith(f"{family}.metal-")]
    chosen = complete_type_name(f"{family}.metal")

    assert chosen in INSTANCE_TYPES
    assert INSTANCE_TYPES[chosen].vcpus == min(kind.vcpus for kind in sizes)
    assert complete_type_name(chosen) == chosen


# c6i.metal exists as it is; the others are no types that could be meant.
@pytest.mark.parametrize("name", ["c6i.metal", "r7iz.met", "r7iz.16xlarge", "r7iz", "m7g.metal"])
def test_other_names_stay_as_they_are(name: str) -> None:
    assert complete_type_name(name) == name


def test_only_types_that_can_run_here_are_suggested() -> None:
    names = ["r7g.metal", "r7a.metal-48xl", "c6i.metal", "r7iz.metal-16xl", "m7i-flex.large"]
    assert nearest_type("r7iz.metals", names) == "; did you mean r7iz.metal-16xl?"
    assert nearest_type("r7g.metall", names) == "; did you mean r7iz.metal-16xl?"
