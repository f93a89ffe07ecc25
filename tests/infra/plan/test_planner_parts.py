"""The planner: explanations, prices, software, and the order of ``down``."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from infra.cost.prices import table_prices
from infra.ec2 import tags
from infra.ec2.instances import HEAD, WORKER
from infra.ec2.inventory import Inventory, Resource, SecondGuard
from infra.ec2.network import SecurityGroup
from infra.errors import SprError
from infra.plan.actions import ActionKind
from infra.plan.planner import (
    check_head_is_not_stopped,
    mesh_digest,
    number_instances,
    plan_down,
    plan_up,
    rank_instances,
)
from infra.spec import ClusterSpec
from infra.words import tag_value
from tests.infra.plan.test_planner import ELSEWHERE, GROWTH, SPEC, changed, ids_of, kinds, there
from tests.infra.plan_inputs import (
    CALLER,
    NOW,
    PLACEMENT,
    RECIPE,
    make_found,
    make_group,
    make_image,
    make_machine,
    make_machines,
    make_plan_input,
    make_spec,
)

K = ActionKind
FOLLOWED = "198.51.100.9/32"


def test_every_termination_has_a_reason() -> None:
    machines = (*changed(1, state="stopped"), make_machine(3), make_machine(4, **ELSEWHERE))
    plan_input = replace(there(instances=machines), unhealthy={"i-3": "impaired"})

    (removal,) = plan_up(plan_input).terminations
    assert plan_up(there()).expected_min == (0, 0)
    assert plan_up(make_plan_input(SPEC)).expected_min == (20, 105)

    assert removal.title == ("Terminate: i-1 (stopped), i-3 (impaired), i-4 (not needed)")


def test_a_cluster_keeps_the_software_that_it_was_made_with() -> None:
    old = "aaaaaaaaaaaa"
    machines = tuple(replace(m, tags={**m.tags, tags.INSTALLED: old}) for m in make_machines(2))
    images = (make_image(**{tags.INSTALLED: old}),)
    plan_input = make_plan_input(SPEC, make_found(SPEC, instances=machines, images=images))

    assert plan_input.recipe == RECIPE
    assert plan_input.software == old
    assert kinds(plan_up(plan_input)) == (ActionKind.RECORD, *GROWTH)


def test_of_several_kept_images_the_newest_is_used_unless_the_cluster_has_its_own() -> None:
    old, new = (replace(make_image(f"ami-{day}"), created=f"2026-07-{day}") for day in (19, 20))
    pending = make_found(SPEC, instances=(), images=(make_image("ami-own", "pending"),))
    cached = (old, new, replace(old, id="ami-9"))

    assert make_plan_input(SPEC, cached=cached).image == new
    assert make_plan_input(SPEC, pending, cached=cached).image == new
    packed = replace(old, id="ami-0", tags={**old.tags, tags.PACKAGES: "0123 requirements.txt"})
    assert make_plan_input(SPEC, cached=(*cached, packed)).image == packed
    own = make_found(SPEC)
    assert make_plan_input(SPEC, own, cached=(packed,)).image == make_image()
    kept = replace(own, images=(make_image(**{tags.KEPT: "yes"}),))
    assert make_plan_input(SPEC, kept, cached=(packed,)).image == packed
    assert make_plan_input(SPEC, make_found(SPEC), cached=cached).image == make_image()
    large = replace(own, images=(replace(kept.images[0], volume_gib=SPEC.volume_gib + 1),))
    assert make_plan_input(SPEC, large).image is None
    assert make_plan_input(SPEC, large).large_image is None, "an existing cluster keeps its disks"
    spec = make_spec(3, bake="none")
    assert make_plan_input(spec, pending).image is None
    without = make_found(spec, images=())
    assert K.BEGIN_IMAGE in kinds(plan_up(make_plan_input(spec, without)))
    assert K.BEGIN_IMAGE not in kinds(plan_up(make_plan_input(spec, without, cached=cached)))


@pytest.mark.parametrize(
    ("found", "cidrs"),
    [
        ((), (CALLER,)),
        (("203.0.113.0/24",), ("203.0.113.0/24",)),
        (("198.51.100.0/24",), ("198.51.100.0/24", CALLER)),
        (("2001:db8::/32",), ("2001:db8::/32", CALLER)),
        ((FOLLOWED,), (CALLER,)),
        (("0.0.0.0/0", FOLLOWED), ("0.0.0.0/0",)),
    ],
)
def test_the_ranges_that_the_user_chose_stay_and_the_callers_address_follows(
    found: tuple[str, ...], cidrs: tuple[str, ...]
) -> None:
    group = SecurityGroup("sg-1", "vpc-1", {}, ssh_cidrs=found, followed=frozenset({FOLLOWED}))
    assert group.cidrs_for(CALLER) == cidrs
    own = replace(group, ssh_cidrs=(CALLER,), followed=frozenset({CALLER}))
    assert own.cidrs_for(CALLER) == (CALLER,)


def test_the_price_is_that_of_the_type_that_is_there() -> None:
    spec = make_spec(3, instance_types=("m7i.metal-24xl", "r7iz.metal-16xl"))
    found = make_found(spec)

    prices = table_prices("us-east-1", spec.instance_types)
    beside = 100 * 0.08 / 720 + 0.005  # disk and public address

    def usd(spec: ClusterSpec, *found: Inventory) -> float:
        price = plan_up(make_plan_input(spec, *found, prices=prices)).price
        assert price is not None
        return price.usd

    assert usd(spec, found) == pytest.approx(3 * (6.5472 + beside))
    # Before anything is there: of the types that it could become, the dearest.
    assert usd(spec) == pytest.approx(3 * (6.5472 + beside))
    cheap = make_spec(3, instance_types=("m7i.metal-24xl",))
    assert usd(cheap) == pytest.approx(3 * (5.32224 + beside))


def test_ranks_are_by_role_and_launch() -> None:
    same = make_machine(1).launch_time
    machines = [
        make_machine(4, launch_time=same, launch_index=1),
        make_machine(9, HEAD),
        make_machine(3, launch_time=same, launch_index=2),
        make_machine(1),
    ]

    assert [machine.id for machine in rank_instances(machines)] == ["i-9", "i-1", "i-4", "i-3"]
    # Connected nodes are known by their ranks, whatever their addresses are.
    one, two = machines[:2]
    assert mesh_digest([one, two]) != mesh_digest([two, one])
    assert mesh_digest([one, two]) == mesh_digest([one, replace(two, public_ip="192.0.2.1")])


@pytest.mark.parametrize(
    ("ranks", "wanted", "names"),
    [
        (("0-2", "0-2", "0-2"), 3, {0: "i-0", 1: "i-1", 2: "i-2"}),
        (("0-3", None, "0-3", "0-3"), 4, {0: "i-0", 2: "i-2", 3: "i-3"}),
        (("0-3", None, "0-3", "0-3"), 3, {0: "i-0", 1: "i-2", 2: "i-3"}),
        (("3", "2-4", "", "1-4", "4 1"), 5, {0: "i-0", 1: "i-1", 2: "i-2", 3: "i-3", 4: "i-4"}),
        (("0-3", "0-3", None, None, "7 0-1 2-5"), 4, {0: "i-0", 1: "i-1", 3: "i-4"}),
        (("0-2", "x", "0-2"), 3, {0: "i-0", 1: "i-1", 2: "i-2"}),
        (("0-2", "5 1", "5-6 1"), 3, {0: "i-0", 1: "i-1", 2: "i-2"}),
        ((None, "0 2", "0 0 1"), 3, {1: "i-2", 2: "i-1"}),
        ((), 3, {}),
    ],
)
def test_machines_keep_their_ranks(
    ranks: tuple[str | None, ...], wanted: int, names: dict[int, str]
) -> None:
    machines = [
        make_machine(n, HEAD if n == 0 else WORKER, launch_index=n, labels={tags.RANKS: text})
        for n, text in enumerate(ranks)
        if text is not None
    ]

    found = number_instances(reversed(machines), wanted)

    assert {rank: machine.id for rank, machine in found.items()} == names
    assert [*found] == sorted(found)


def test_ranks_fit_into_a_tag() -> None:
    for ranks in ([], [0], [1, 2, 3, 7], [*range(1, 500)], [2, 4]):
        text = tags.render_ranks(ranks)
        assert [tags.parse_rank(text, index) for index in range(len(ranks))] == ranks
        assert tags.parse_rank(text, len(ranks)) is None
        assert tag_value(text) == text
    assert tags.render_ranks([1, 2, 3, 7]) == "1-3 7"
    assert tags.render_ranks([*range(0, 400, 2)]) == ""


# The second guard


def guarded(*machines: str) -> Inventory:
    return replace(make_found(SPEC), guards=(SecondGuard("spr-cluster-bert", frozenset(machines)),))


def test_machines_without_a_schedule_get_one_before_others_are_bought() -> None:
    spec = make_spec(3, second_guard=True)
    for machines, wanted in ((("i-0", "i-1", "i-2"), []), (("i-0",), [("i-1", "i-2")])):
        plan = plan_up(make_plan_input(spec, guarded(*machines)))
        assert [action.ids for action in plan.actions if action.kind is K.GUARD] == wanted

    order = kinds(plan_up(make_plan_input(spec)))

    assert order.index(K.CREATE_GROUP) < order.index(K.GUARD) < order.index(K.RUN_HEAD)
    assert K.GUARD not in kinds(plan_up(make_plan_input(make_spec(3))))


def test_that_of_an_abandoned_cluster_goes_before_the_record_of_it() -> None:
    theirs = replace(make_group(SPEC), tags={tags.OWNER_KEY: "SHA256:theirs", tags.GUARD: "yes"})
    found = replace(guarded(), instances=(), key_pairs=(), security_groups=(theirs,))

    order = kinds(plan_up(make_plan_input(SPEC, found)))

    assert order.index(K.DELETE_GUARDS) < order.index(K.DELETE_GROUPS)


# What is taken away, and in which order


def everything() -> Inventory:
    return make_found(
        SPEC,
        spot_requests=(Resource("sir-1", {}),),
        volumes=(Resource("vol-1", {}), Resource("vol-2", {})),
        interfaces=(Resource("eni-1", {}),),
        guards=(SecondGuard("spr-cluster-bert"),),
        snapshots=(Resource("snap-other", {}), Resource("snap-of-ami-1", {})),
    )


def test_what_machines_hold_is_left_to_ec2_while_they_end() -> None:
    plan = plan_down(everything())

    images = (K.DELETE_IMAGES, K.DELETE_SNAPSHOTS)
    assert kinds(plan) == (K.TERMINATE, K.CANCEL_SPOT, *images, K.DELETE_KEYS)
    assert ids_of(plan, K.TERMINATE) == ("i-0", "i-1", "i-2")
    assert ids_of(plan, K.CANCEL_SPOT) == ("sir-1",)
    # An image's own snapshots go with it even without a tag, and once.
    assert ids_of(plan, K.DELETE_SNAPSHOTS) == ("snap-of-ami-1", "snap-other")
    untagged = plan_down(Inventory(images=(make_image(),)))
    assert ids_of(untagged, K.DELETE_SNAPSHOTS) == ("snap-of-ami-1",)
    assert not set(images) & set(kinds(plan_down(everything().without_image())))


def test_every_kind_that_is_left_is_removed_in_the_order_in_which_ec2_lets_go() -> None:
    rest = replace(everything(), instances=())
    plan = plan_down(rest)

    order = kinds(plan)
    assert len(order) == len(rest.ids()) == 9
    assert order.index(K.DELETE_IMAGES) < order.index(K.DELETE_SNAPSHOTS)
    assert order.index(K.DELETE_INTERFACES) < order.index(K.DELETE_GROUPS)
    assert order.index(K.DELETE_GUARDS) < order.index(K.DELETE_GROUPS)
    assert ids_of(plan, K.DELETE_PLACEMENTS) == (PLACEMENT.id,)
    assert ids_of(plan, K.DELETE_VOLUMES) == ("vol-1", "vol-2")


@pytest.mark.parametrize("hours", [1, 9])
def test_a_stopped_head_is_not_started_to_its_end(hours: int) -> None:
    ends = {tags.EXPIRES: tags.render_time(NOW + timedelta(hours=8))}
    found = make_found(SPEC, instances=(make_machine(0, HEAD, state="stopped", labels=ends),))

    with pytest.raises(SprError, match="the head node i-0 is stopped") as caught:
        check_head_is_not_stopped(found, "--name bert", "eu-west-1", NOW + timedelta(hours=hours))

    keep, _, start = str(caught.value.hint).rpartition("aws ec2 start-instances")
    assert start.startswith(" --region eu-west-1 --instance-ids i-0")
    assert ("--instance-initiated-shutdown-behavior stop" in keep) is (hours == 9)
