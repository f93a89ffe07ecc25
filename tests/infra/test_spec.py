"""The cluster spec: validation, durations, and instance types."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES, complete_type_name, nearest_type
from infra.spec import LONGEST_TTL, build_spec
from infra.words import parse_duration, render_duration


def test_what_only_the_api_can_give_is_refused_as_well() -> None:
    for options, message in (
        ({"node": 1}, "unknown key node; did you mean nodes"),
        ({"ssh_cidrs": ()}, "--ssh-cidr"),
        ({"instance_types": ()}, "--instance-type '': expected 1 to 12 EC2 types"),
    ):
        with pytest.raises(UsageError, match=message):
            build_spec(**{"ssh_cidrs": ("203.0.113.7/32",), **options})


def test_a_type_that_is_named_twice_is_tried_once() -> None:
    names = ("m7i.metal-24xl", "r7iz.metal-16xl", "m7i.metal-24xl")

    spec = build_spec(ssh_cidrs=("203.0.113.7/32",), instance_types=names)

    assert spec.instance_types == ("m7i.metal-24xl", "r7iz.metal-16xl")


@pytest.mark.parametrize(
    ("text", "hours"), [("8h", 8), ("90m", 1.5), ("2d", 48), ("0.5h", 0.5), (" 1h ", 1)]
)
def test_duration(text: str, hours: float) -> None:
    assert parse_duration(text, "--ttl") == timedelta(hours=hours)


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


def test_a_proxys_url_has_a_port_and_no_login() -> None:
    spec = build_spec(ssh_cidrs=("10.0.0.0/8",), proxy="http://proxy.corp.example:3128/")
    assert spec.proxy == "http://proxy.corp.example:3128"
    none = build_spec(ssh_cidrs=("10.0.0.0/8",), proxy="none", jump="none")
    assert (none.proxy, none.jump) == (None, None)
    with pytest.raises(UsageError, match="readable in the cluster's tags") as caught:
        build_spec(ssh_cidrs=("10.0.0.0/8",), proxy="http://me:secret@proxy:3128")
    assert "secret" not in f"{caught.value} {caught.value.hint}"


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
