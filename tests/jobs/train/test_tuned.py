"""Results of `--tune placement`: what they are valid for, when they are dropped, how `train` uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.train.request import TrainRequest, spec_of
from jobs.train.train import apply_tuned
from jobs.train.tuned import (
    FILE,
    TuningKey,
    TuningResult,
    add_result,
    describe_nodes,
    parse_tuned,
    read_tuned,
    render_tuned,
    save_tuned,
    tuning_key,
)
from jobs.worker.spec import PlacementOptions, Resources
from jobs.worker.tasks.squad.task import DEMO, SquadOptions
from provision.stacks.load import load_stack
from tests.fakes import FakeHost
from tests.jobs.places.topologies import machine

KEY = TuningKey("upstream", "gloo", "auto", False, "scratch", 384, "2 x Xeon, 32 cores in 1")
BEST = TuningResult(KEY, 2, 0, None, 57.5, "2026-11-21T08:00:00+00:00")
BOTH = frozenset({"placement", "batch_size"})


def key(options: SquadOptions = DEMO, stack: str = "upstream", **more: Any) -> TuningKey:
    facts = more.pop("facts", [machine(32), machine(32)])
    request = TrainRequest(
        spec_of(options, resources=Resources(None, PlacementOptions(**more))), Path("results")
    )
    return tuning_key(load_stack(stack), request, facts)


def test_what_is_kept_is_read_again() -> None:
    results = (BEST, replace(BEST, key=replace(KEY, stack="intel"), ccl_workers=2, batch_size=8))
    assert parse_tuned(render_tuned(results)) == results


@pytest.mark.parametrize("text", ["", "{}", '[{"key": {}}]'])
def test_an_unreadable_file_counts_as_empty(text: str) -> None:
    assert parse_tuned(text) == ()


def test_a_new_result_replaces_the_old_one() -> None:
    other = replace(BEST, key=replace(KEY, dtype="fp32"))
    newer = replace(BEST, nproc_per_node=4)

    assert add_result((BEST, other), newer) == (other, newer)


def test_results_for_other_nodes_are_dropped() -> None:
    older = replace(BEST, key=replace(KEY, nodes="4 x Xeon, 32 cores in 1", dtype="fp32"))
    assert add_result((older,), BEST) == (BEST,)


def test_results_are_kept_on_the_head() -> None:
    head = FakeHost("node0", [(f"cat {FILE}", lambda _: head.files.get(FILE, b"").decode())])

    assert read_tuned(head, KEY) is None
    save_tuned(head, BEST)
    assert read_tuned(head, KEY) == BEST
    assert read_tuned(head, replace(KEY, max_length=128)) is None


def test_the_key_names_what_a_speed_depends_on(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    base = key()
    others = [
        key(stack="intel"),
        key(replace(DEMO, backend="ccl")),
        key(replace(DEMO, dtype="bf16")),
        key(replace(DEMO, model="bert-base-uncased")),
        key(replace(DEMO, model=str(model))),
        key(replace(DEMO, max_length=256)),
        key(replace(DEMO, ipex=True)),
        key(facts=[machine(32)]),
        key(facts=[machine(32), machine(16)]),
        key(facts=[machine(32, numa=2), machine(32)]),
    ]
    assert len({base, *others}) == 1 + len(others)
    # How long it trains, on what, and its batch change nothing, nor how ranks are asked for.
    same = replace(DEMO, epochs=3, data=None, seed=1, batch_size=2, learning_rate=1e-3)
    assert key(same) == base == key(nproc_per_node=2)
    assert key(replace(DEMO, backend="gloo")) == base


def test_a_model_of_the_same_shape_has_the_same_key(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"dim": 768}')
    here, there = (key(replace(DEMO, model=str(tmp_path / name))) for name in ("here", "there"))
    assert here == there


def test_machines_are_described_whatever_their_order() -> None:
    small, large = machine(16), machine(32, numa=2)

    assert describe_nodes([small, large, large]) == describe_nodes([large, small, large])
    assert describe_nodes([small, small]) == "2 x Xeon, 16 cores in 1"


def request(may_tune: frozenset[str]) -> TrainRequest:
    return TrainRequest(spec_of(DEMO), Path("results"), may_tune)


def test_train_uses_the_tuned_placement_and_logs_it() -> None:
    changed, result = apply_tuned(BEST, request(BOTH), 2)

    assert changed.placement == PlacementOptions(nproc_per_node=2)
    assert changed.options == DEMO
    assert result == "--ppn 2 from `--tune placement` of 2026-11-21; --placement auto ignores it"


def test_train_uses_the_tuned_batch_and_logs_the_global_batch() -> None:
    changed, result = apply_tuned(replace(BEST, batch_size=32, ccl_workers=1), request(BOTH), 4)

    assert changed.placement.ccl_workers == 1
    assert changed.options.batch_size == 32
    assert result.startswith(
        "--ppn 2 --ccl-workers 1 --batch-size 32 (a global batch of 256 samples)"
    )


def test_the_users_options_are_kept() -> None:
    best = replace(BEST, batch_size=32)

    changed, result = apply_tuned(best, request(frozenset({"placement"})), 2)
    assert (changed.options.batch_size, changed.placement.nproc_per_node) == (8, 2)
    assert "--batch-size" not in result
    changed, result = apply_tuned(best, request(frozenset({"batch_size"})), 2)
    assert (changed.options.batch_size, changed.placement.nproc_per_node) == (32, None)
    assert result.startswith("--batch-size 32 from")
    assert apply_tuned(BEST, request(frozenset({"batch_size"})), 2)[1] == ""
