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
    # A type that is named twice is tried once.
    names = ("m7i.metal-24xl", "r7iz.metal-16xl", "m7i.metal-24xl")
    spec = build_spec(ssh_cidrs=("203.0.113.7/32",), instance_types=names)
    assert spec.instance_types == names[:2]


@pytest.mark.parametrize(
    ("text", "hours"), [("8h", 8), ("90m", 1.5), ("2d", 48), ("0.5h", 0.5), (" 1h ", 1)]
)
def test_duration(text: str, hours: float) -> None:
    assert parse_duration(text, "--ttl") == timedelta(hours=hours)
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


def test_metal_without_a_size_is_the_familys_smallest() -> None:
    metal = [kind for kind in INSTANCE_TYPES.values() if ".metal-" in kind.name]
    for family in {kind.name.partition(".")[0] for kind in metal}:
        sizes = [kind for kind in metal if kind.name.startswith(f"{family}.")]
        smallest = min(sizes, key=lambda kind: kind.vcpus).name
        assert complete_type_name(f"{family}.metal") == smallest == complete_type_name(smallest)
    # c6i.metal exists as it is; the others are no types that could be meant.
    for name in ("c6i.metal", "r7iz.met", "r7iz.16xlarge", "r7iz", "m7g.metal"):
        assert complete_type_name(name) == name


def test_only_types_that_can_run_here_are_suggested() -> None:
    names = ["r7g.metal", "r7a.metal-48xl", "c6i.metal", "r7iz.metal-16xl", "m7i-flex.large"]
    assert nearest_type("r7iz.metals", names) == "; did you mean r7iz.metal-16xl?"
    assert nearest_type("r7g.metall", names) == "; did you mean r7iz.metal-16xl?"
