"""Bad input: one clear line, and nothing done."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from infra.catalogue import CATALOGUE, find_instance_type
from infra.errors import UsageError
from infra.inventory import Inventory
from infra.plan import ActionKind, plan_down, plan_up
from infra.spec import build_spec, parse_ttl

GOOD: dict[str, Any] = {"name": "bert", "nodes": 4, "stack": "intel", "ssh_cidr": "203.0.113.7/32"}


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"nodes": 0}, "--nodes 0: expected a whole number from 1 to 256"),
        ({"nodes": -3}, "--nodes -3: expected a whole number"),
        ({"nodes": 257}, "--nodes 257"),
        ({"name": "Bert"}, "--name Bert: expected lower-case letters"),
        ({"name": "../x"}, "--name ../x"),
        ({"name": ""}, "--name : expected"),
        ({"name": "a" * 33}, "at most 32"),
        ({"volume_gib": 5}, "--volume-gib 5: expected from 20"),
        ({"ssh_cidr": "everywhere"}, "--ssh-cidr 'everywhere'"),
        ({"ssh_cidr": "10.0.0.1/8"}, "--ssh-cidr '10.0.0.1/8': 10.0.0.1/8 has host bits set"),
        ({"ttl": timedelta(seconds=1)}, "--ttl 0:00:01: expected from 1m to 30d"),
        ({"instance_type": "r7iz.metal-16x"}, "did you mean r7iz.metal-16xl"),
    ],
)
def test_a_wrong_wish_is_answered_with_option_value_and_what_fits(
    wish: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_spec(**{**GOOD, **wish})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_type_offers_near_names_and_those_with_amx() -> None:
    with pytest.raises(UsageError) as caught:
        find_instance_type("m7i.metal-24x")
    assert "did you mean m7i.metal-24xl" in caught.value.message
    assert caught.value.hint is not None
    assert "r7iz.metal-16xl" in caught.value.hint
    assert "c6i.16xlarge" not in caught.value.hint


@pytest.mark.parametrize(("text", "hours"), [("8h", 8), ("90m", 1.5), ("2d", 48), ("0.5h", 0.5)])
def test_ttl(text: str, hours: float) -> None:
    assert parse_ttl(text) == timedelta(hours=hours)


@pytest.mark.parametrize("text", ["", "8", "h", "-1h", "8 hours", "1w"])
def test_a_wrong_ttl(text: str) -> None:
    with pytest.raises(UsageError, match="such as 90m, 8h or 2d"):
        parse_ttl(text)


def test_the_plan_tells_the_price_and_the_longest_cost() -> None:
    plan = plan_up(build_spec(**GOOD, ttl=timedelta(hours=10)))

    assert plan.usd_per_hour == pytest.approx(4 * 6.5472)
    assert plan.usd_at_most == pytest.approx(40 * 6.5472)
    assert [action.kind for action in plan.actions] == [
        ActionKind.CREATE_GROUP,
        ActionKind.IMPORT_KEY,
        ActionKind.RUN_HEAD,
        ActionKind.INSTALL,
        ActionKind.CREATE_IMAGE,
        ActionKind.RUN_WORKERS,
        ActionKind.CONNECT,
        ActionKind.VERIFY,
    ]


def test_a_plan_to_remove_nothing_is_empty() -> None:
    assert plan_down(Inventory(), keep_image=False).actions == ()


def test_the_catalogue_is_sane() -> None:
    for entry in CATALOGUE.values():
        assert entry.vcpus == 2 * entry.cores or entry.name.startswith(("c8i", "m8i", "r8i"))
        assert entry.usd_per_hour > 1
