"""The record: options to tags and back, and their combination."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.cost.prices import table_prices
from infra.ec2 import tags
from infra.ec2.cluster_record import (
    ClusterRecord,
    limit_record,
    merge_options,
    new_record,
    parse_record,
    record_tags,
)
from infra.errors import SprError, UsageError
from infra.instance_types import INSTANCE_TYPES
from infra.spec import ClusterOptions, ClusterSpec, build_spec

NOW = datetime(2026, 7, 31, 12, 0, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
CALLER = "203.0.113.7/32"
# What every AWS service takes in a tag's value:
# https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
TAG_VALUE = re.compile(r"[\w \d_.:/=+\-@]{0,256}")


def make(**options: Any) -> tuple[ClusterSpec, ClusterRecord]:
    spec = build_spec(
        **{"name": "bert", "nodes": 3, "stack": "intel", "ssh_cidrs": (CALLER,), **options}
    )
    return spec, new_record(spec, NOW, None)


whole_minutes = st.integers(5, 43_200).map(lambda minutes: timedelta(minutes=minutes))
any_wishes = st.fixed_dictionaries(
    {
        # An option that is not listed below: any Boolean, or its default.
        **{
            name: st.booleans() if field.annotation is bool else st.just(field.default)
            for name, field in ClusterOptions.model_fields.items()
            if name != "name"
        },
        "nodes": st.integers(1, 256),
        "stack": st.sampled_from(["intel", "upstream"]),
        "instance_types": st.lists(
            st.sampled_from(sorted(INSTANCE_TYPES)), min_size=1, max_size=12, unique=True
        ).map(tuple),
        "volume_gib": st.integers(20, 16384),
        "volume_throughput": st.none() | st.integers(125, 750),
        "volume_iops": st.none() | st.integers(3000, 10000),
        "volume_init_rate": st.none() | st.integers(100, 300),
        "market": st.sampled_from(["on-demand", "spot", "spot-or-on-demand"]),
        # In cents, as prices are: a tag keeps six digits.
        "max_price": st.none() | st.integers(1, 99_999).map(lambda cents: cents / 100),
        "ttl": whole_minutes,
        "grace": st.integers(0, 1440).map(lambda minutes: timedelta(minutes=minutes)),
        "max_time": st.none() | whole_minutes,
        "budget": st.none() | st.integers(1, 9_999_999).map(lambda cents: cents / 100),
        "idle_timeout": st.none() | whole_minutes,
        "bake": st.sampled_from(["head", "none"]),
        "jump": st.none() | st.sampled_from(["eice", "ssm", "me@jump.example.com:2222"]),
        "subnet_ids": st.lists(
            st.integers(0, 16**17 - 1).map("subnet-{:017x}".format), max_size=10, unique=True
        ).map(tuple),
        "capacity_reservation": st.none() | st.just("cr-0123456789abcdef0"),
        "bucket": st.sampled_from(["s3://team-b", "s3://team-b/results"]),
        "read_from": st.sampled_from([(), ("s3://data",), ("s3://data/x", "s3://more/y=1")]),
        "instance_profile": st.none() | st.just("nodes@team"),
        "bucket_kms_key": st.none() | st.just("arn:aws:kms:us-east-1:123456789012:key/0123"),
        "proxy": st.none() | st.just("http://proxy.example.com:3128"),
        "labels": st.sampled_from([(), (("cost-center", "ml 42"), ("team", "nlp"))]),
    }
).map(
    lambda w: {
        **w,
        "bucket_kms_key": None if w["instance_profile"] else w["bucket_kms_key"],
        "jump": w["jump"] if w["private"] else None,
        "capacity_reservation": w["capacity_reservation"] if w["market"] == "on-demand" else None,
    }
)


@settings(max_examples=50)
@given(any_wishes)
def test_every_option_survives_the_tags(options: dict[str, Any]) -> None:
    spec, record = make(**options)

    labels = record_tags(spec, record)
    read = parse_record(labels)

    assert read == record
    assert read is not None
    assert read.options == options
    assert merge_options("bert", (CALLER,), {}, read) == spec
    for key, value in labels.items():
        assert TAG_VALUE.fullmatch(value), f"{key}={value}"
        assert len(key) <= 128
        assert not key.startswith("aws:")


def test_the_longest_record_fits_the_tags_of_one_resource() -> None:
    options: dict[str, Any] = {"nodes": 256, "market": "spot", "second_guard": True}
    options |= {"bucket": "s3://team", "read_from": ("s3://data",), "max_time": 20 * HOUR}
    options |= {"instance_types": tuple(sorted(INSTANCE_TYPES, key=len)[-12:])}
    spec, record = make(labels=tuple((f"key-{n}", "value") for n in range(10)), **options)
    found = record_tags(spec, limit_record(record, None, 1.0), "SHA256:mine")

    # 50 tags a resource; the group has its name, its cluster, and its owner besides.
    assert len(found) + 3 <= 50
    assert max(map(len, found.values())) <= 256


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nodes", "many"),
        ("market", ""),
        ("max-price", "-1"),
        ("idle-timeout", "1m"),
        ("created", "yesterday"),
        ("ttl", None),
        ("expires", None),
        ("placement-group", None),
        ("subnet", None),
    ],
)
def test_an_invalid_record_is_reported(key: str, value: str | None) -> None:
    assert parse_record({tags.CLUSTER: "bert", "Name": "bert-group"}) is None
    changed = {**record_tags(*make()), f"spr-cluster:{key}": value}
    labels = {label: text for label, text in changed.items() if text is not None}

    with pytest.raises(SprError, match=r"invalid cluster record in the tags") as it:
        parse_record(labels)
    assert f"spr-cluster:{key} is missing" in str(it.value) or value is not None
    assert "restore the tags, or remove it: `spr-cluster down --name" in str(it.value)


def test_what_is_given_now_counts_over_the_record_and_that_over_the_clouds_defaults() -> None:
    _, record = make(nodes=5, stack="upstream", market="spot")

    spec = merge_options("bert", (CALLER,), {"nodes": 2}, record, {"stack": "intel", "nodes": 9})

    assert (spec.nodes, spec.stack, spec.spot) == (2, "upstream", True)
    price: dict[str, Any] = {"max_price": 4.0}
    priced = merge_options("bert", (CALLER,), price, record)
    assert priced.max_price == 4
    on_demand = {"market": "on-demand"}
    old = new_record(priced, NOW, record)
    assert not merge_options("bert", (CALLER,), on_demand, old).spot
    with pytest.raises(UsageError, match="--max-price requires --market spot"):
        merge_options("bert", (CALLER,), {**price, **on_demand}, old)
    assert merge_options("bert", (CALLER,), {}, None, {"stack": "intel"}).stack == "intel"
    role = {"permissions_boundary": "arn:aws:iam::123456789012:policy/b", "second_guard": True}
    no_guard = {**role, "second_guard": False}
    _, old = make(**role)
    spec = merge_options("bert", (CALLER,), {"second_guard": False}, old)
    read = parse_record(record_tags(spec, new_record(spec, NOW, old)))
    assert read
    assert merge_options("bert", (CALLER,), {"second_guard": True}, read).permissions_boundary
    with pytest.raises(UsageError, match="--permissions-boundary: it is for the roles of"):
        merge_options("bert", (CALLER,), no_guard, old)


def test_the_end_is_known_to_the_second_in_utc_as_its_tag_is() -> None:
    there = (NOW + timedelta(microseconds=999_999)).astimezone(timezone(2 * HOUR))
    spec, _ = make()

    record = new_record(spec, there, None)

    assert record.created == NOW
    assert record_tags(spec, record)[tags.EXPIRES] == "2026-07-31T20:00:00Z"


def test_only_a_job_with_a_limit_keeps_nodes_after_the_grace_period() -> None:
    _, record = make(ttl=HOUR, grace=HOUR / 2)
    over = NOW + HOUR
    assert record.spoken_grace(over) == "until 13:30 UTC (in 30 min)"
    moved = replace(record, latest=NOW + 240 * HOUR)
    assert moved.spoken_grace(over).startswith("until 13:30 UTC (in 30 min), or until Aug 10")
    assert moved.spoken_grace(over + HOUR).startswith("until Aug 10")


# The limits of --max-time and --budget


@pytest.mark.parametrize(
    ("limits", "usd", "hours"),
    [
        ({"max_time": 5 * HOUR}, 0.0, 5),
        ({"budget": 30}, 3.0, 10 - 1 / 12),
        ({"max_time": 5 * HOUR, "budget": 30}, 3.0, 5),
        ({"max_time": 12 * HOUR, "budget": 30}, 3.0, 10 - 1 / 12),
        ({"budget": 30_000}, 3.0, 720),
        ({"budget": 30, "second_guard": True}, 3.0, 10 - 1 / 6),
        ({"max_time": 5 * HOUR, "second_guard": True}, 0.0, 5),
    ],
)
def test_the_first_limit_bounds_the_life_from_creation(
    limits: dict[str, Any], usd: float, hours: float
) -> None:
    _, record = make(ttl=2 * HOUR, **limits)

    assert limit_record(record, None, usd).bound == record.created + hours * HOUR


def test_a_time_to_live_beyond_its_limit_names_one_that_fits() -> None:
    _, record = make(ttl=10 * HOUR, budget=30)

    said = r"--budget 30: it pays for 10 h at \$3.00 an hour; the nodes may run 10 h 35 min with"
    with pytest.raises(UsageError, match=said) as caught:
        limit_record(record, None, 3.0)

    assert "--ttl 565m with --grace 30m" in str(caught.value.hint)
    _, fits = make(ttl=timedelta(minutes=565), budget=30)
    assert limit_record(fits, None, 3.0).bound == fits.latest


@pytest.mark.parametrize("guarded", [False, True])
def test_a_cluster_that_lives_as_long_as_its_limit_may_change_but_not_grow(
    guarded: bool,
) -> None:
    _, record = make(ttl=HOUR, budget=30, second_guard=guarded)
    old = limit_record(record, None, 7.7)
    assert old.bound
    old = replace(old, latest=old.bound)
    assert limit_record(old, old, 7.7).bound == old.bound
    with pytest.raises(UsageError) as caught:
        limit_record(old, old, 7.8)
    # --ttl and --grace are for new clusters.
    assert caught.value.hint == "use --budget 31"
    assert limit_record(replace(old, options={**old.options, "budget": 31}), old, 7.8).bound
    _, late = make(ttl=HOUR, max_time=HOUR)
    with pytest.raises(UsageError, match="--max-time 1h: the nodes may run 90m") as caught:
        limit_record(late, replace(late, bound=late.latest), 0.0)
    assert caught.value.hint == "use --max-time 90m"


def test_a_cluster_that_was_larger_or_dearer_keeps_the_limit_of_its_price() -> None:
    _, record = make(ttl=HOUR, nodes=8)

    def change(record: ClusterRecord, **options: Any) -> ClusterRecord:
        spec, _ = make(**{**record.options, **options})
        return parse_record(record_tags(spec, new_record(spec, NOW, record))) or record

    tried = change(record, nodes=12)
    for bought, nodes in ((None, 12), (10, 10), (1, 3), (0, 3)):
        assert new_record(make()[0], NOW, tried, bought=bought).dearest["nodes"] == nodes
    small = change(tried, nodes=1, budget=30)
    assert (small.nodes, small.dearest["nodes"]) == (1, 12)
    said = r"(?s)at \$24.00 an hour, the cluster's highest price.*use --budget 38$"
    with pytest.raises(UsageError, match=said):
        limit_record(small, record, 24.0)
    _, spot = make(market="spot", max_price=5.0)
    with pytest.raises(UsageError, match="the cluster's highest price"):
        limit_record(change(spot, max_price=1.0, budget=3), spot, 15.0)
    prices = table_prices("us-east-1", spot.options["instance_types"])

    def most(record: ClusterRecord) -> float:
        price = prices.most(record.options["instance_types"], record.dearest)
        assert price
        return price.usd

    assert most(change(spot, max_price=1.0)) == most(spot) < most(record)
    assert most(change(spot, max_price=9.0)) - most(spot) == pytest.approx(4)
    assert most(change(record, market="spot", max_price=1.0)) == most(record)
    assert most(change(spot, market="on-demand", max_price=None)) == most(record)
