"""Results of `--tune placement`: what they are valid for, when they are dropped, how `train` uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.train.request import TrainRequest, spec_of
from jobs.train.train import apply_tuned
from jobs.train.tuned import FILE, TuningKey, TuningResult, read_tuned, save_tuned, tuning_key
from jobs.worker.spec import PlacementOptions, Resources
from jobs.worker.tasks.squad.task import DEMO, SquadOptions
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack
from tests.fakes import FakeHost
from tests.jobs.places.topologies import machine

KEY = TuningKey("upstream", "gloo", "auto", False, "scratch", 384, "2 x Xeon, 32 cores in 1")
BEST = TuningResult(KEY, 2, 0, None, 57.5, "2026-11-21T08:00:00+00:00")
BOTH = frozenset({"placement", "batch_size"})


def key(options: SquadOptions = DEMO, stack: str | Stack = "upstream", **more: Any) -> TuningKey:
    facts = more.pop("facts", [machine(32), machine(32)])
    request = TrainRequest(
        spec_of(options, resources=Resources(None, PlacementOptions(**more))), Path("results")
    )
    found = load_stack(stack) if isinstance(stack, str) else stack
    return tuning_key(found, request, facts)


def test_results_are_kept_on_the_head_as_long_as_they_fit_its_nodes() -> None:
    head = FakeHost("node0", [(f"cat {FILE}", lambda _: head.files.get(FILE, b"").decode())])
    others = [replace(KEY, stack="intel"), replace(KEY, dtype="fp32")]
    elsewhere = replace(BEST, key=replace(KEY, nodes="4 x Xeon, 32 cores in 1"))

    for unreadable in (b"", b"{}", b'[{"key": {}}]'):
        head.files[FILE] = unreadable
        assert read_tuned(head, KEY) is None
    save_tuned(head, elsewhere)
    for each in (KEY, *others):
        save_tuned(head, replace(BEST, key=each, ccl_workers=2, batch_size=8))
    save_tuned(head, BEST)

    assert read_tuned(head, KEY) == BEST
    assert all(read_tuned(head, each) for each in others)
    assert read_tuned(head, elsewhere.key) is None
    assert read_tuned(head, replace(KEY, max_length=128)) is None


def test_the_key_names_what_a_speed_depends_on(tmp_path: Path) -> None:
    model, twin = tmp_path / "model", tmp_path / "twin"
    for folder in (model, twin):
        folder.mkdir()
        (folder / "config.json").write_text('{"dim": 768}')
    base = key()
    others = [
        key(stack="intel"),
        key(replace(DEMO, backend="gloo"), "intel"),
        key(replace(DEMO, dtype="bf16")),
        key(replace(DEMO, model="bert-base-uncased")),
        key(replace(DEMO, model=str(model))),
        key(replace(DEMO, max_length=256)),
        key(facts=[machine(32)]),
        key(facts=[machine(32), machine(16)]),
        key(facts=[machine(32, numa=2), machine(32)]),
    ]
    assert len({base, *others}) == 1 + len(others)
    without = load_stack("intel").model_copy(update={"use_ipex": False})
    assert key(stack=without) != key(replace(DEMO, ipex=True), without) == key(stack="intel")
    # How long it trains, on what, and its batch change nothing, nor how ranks are asked for.
    same = replace(DEMO, epochs=3, data=None, seed=1, batch_size=2, learning_rate=1e-3)
    assert key(same) == base == key(nproc_per_node=2)
    assert key(replace(DEMO, backend="gloo")) == base
    assert key(replace(DEMO, model=str(twin))) in others, "a model of the same shape"


def test_machines_are_described_whatever_their_order() -> None:
    small, large = machine(16), machine(32, numa=2)

    assert key(facts=[small, large, large]) == key(facts=[large, small, large])
    assert key(facts=[small, small]).nodes == "2 x Xeon, 16 cores in 1"


def request(may_tune: frozenset[str]) -> TrainRequest:
    return TrainRequest(spec_of(DEMO), Path("results"), may_tune)


def test_the_users_options_are_kept() -> None:
    best = replace(BEST, batch_size=32)

    changed, result = apply_tuned(best, request(frozenset({"placement"})), 2)
    assert (changed.options.batch_size, changed.placement.nproc_per_node) == (8, 2)
    assert "--batch-size" not in result
    changed, result = apply_tuned(best, request(frozenset({"batch_size"})), 2)
    assert (changed.options.batch_size, changed.placement.nproc_per_node) == (32, None)
    assert result.startswith("--batch-size 32 from")
    assert apply_tuned(BEST, request(frozenset({"batch_size"})), 2)[1] == ""
