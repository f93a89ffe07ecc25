from __future__ import annotations

import io
import json
import math
import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from jobs.worker.fast.optimizer import halve_weights
from jobs.worker.runtime.errors import CheckpointError
from jobs.worker.runtime.output import state_folder
from jobs.worker.runtime.process import FOLDER
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.study.__main__ import share_options
from jobs.worker.tasks.digits import Digits
from jobs.worker.training.checkpoints import (
    EVERY_SECONDS,
    MOST_SHARE,
    WORTH_SECONDS,
    Checkpoint,
    CheckpointTimer,
    RunIdentity,
    count_saved,
    expect_checkpoints,
    list_checkpoints,
    load_state,
    newest_undamaged,
    prune,
    read_checkpoint,
    require_same,
    save_checkpoint,
)
from jobs.worker.training.optimizer_step import _clip_and_update
from jobs.worker.training.options import NEVER
from jobs.worker.training.state import PATIENCE, DivergenceDetector, State, TrainingProgress
from tests.fakes import FakeClock
from tests.jobs.worker.threaded_ranks import run_threaded, session

WATCH = DivergenceDetector(0.2, math.inf, 4, recent=[0.1, 1 / 3])
PROGRESS = TrainingProgress(7, 70, 900, 1.25, [(1, 1 / 3)], [(3, 0.5)], [{"step": 2}], watch=WATCH)
SKEWED = (
    np.square(np.random.default_rng(0).lognormal(sigma=1.5, size=(3000, 16)) - 3).mean(1).tolist()
)


def test_a_checkpoint_by_steps_is_due_every_n_steps_and_at_the_end() -> None:
    due = CheckpointTimer(every=4, clock=FakeClock().monotonic)
    assert [step for step in range(1, 11) if due.by_step(step, last=step == 10)] == [4, 8, 10]
    assert not due.by_time(last=True)
    of_a_trial = CheckpointTimer(share_options(Digits.demo).checkpoint_every)
    assert not of_a_trial.by_step(10, last=True)


def test_a_checkpoint_by_time_costs_at_most_a_small_share_of_it() -> None:
    clock = FakeClock()
    due = CheckpointTimer(every=None, clock=clock.monotonic)
    assert not due.by_step(1, last=True)
    assert not due.by_time(last=True), "time counts from the first question"
    clock.sleep(WORTH_SECONDS)
    assert due.by_time(last=True), "the end of a longer run"
    clock.sleep(EVERY_SECONDS - WORTH_SECONDS)
    assert due.by_time(last=False)
    due.saved(seconds=30)
    clock.sleep(EVERY_SECONDS)
    assert not due.by_time(last=False)
    clock.sleep(30 / MOST_SHARE - EVERY_SECONDS)
    assert due.by_time(last=False)


OPTIONS = {"seed": 1, "learning_rate": 0.1, "batch_size": 8}
SAVED = RunIdentity(2, "fp32", "abc", OPTIONS, {"torch": "2.13", "threads per rank": "4"})


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (SAVED._replace(world_size=3), "the checkpoint has 2 ranks, this run 3"),
        (SAVED._replace(options={**OPTIONS, "seed": 2}), r"other options: --seed 2 \(it was 1\)"),
        (SAVED._replace(options={**OPTIONS, "new": 2}), r"--new 2 \(it was None\)"),
        (SAVED._replace(features="abd"), "the training data has changed"),
    ],
)
def test_another_run_is_refused(now: RunIdentity, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        require_same(SAVED, now)


def test_permitted_changes_are_reported_on_resume() -> None:
    assert require_same(SAVED, SAVED) == []
    now = SAVED._replace(dtype="bf16", options={**OPTIONS, "learning_rate": 0.01})
    assert require_same(SAVED, now) == [
        "--learning-rate 0.01 (it was 0.1)",
        "arithmetic in bf16 (it was fp32)",
    ]
    elsewhere = SAVED._replace(ground={"torch": "2.7", "threads per rank": "4", "new": "1"})
    assert require_same(SAVED, elsewhere) == ["torch 2.7 (it was 2.13)"]


def test_a_checkpoint_and_its_name_are_on_the_disk_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    opened = Path("/proc/self/fd")
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((opened / str(file)).readlink().name)
    )
    saved_steps(tmp_path, 2)
    assert synced == ["state.pt", "checkpoint.json", "step-000002.partial", "checkpoints"]


DISKS = "disks that are 1 GiB larger (`up --volume-gib`)"
COPIES = (
    "warning: copies of checkpoints need 3.6 GB of disk, and no other node has more than 3.5 GB"
)


@pytest.mark.parametrize(
    ("keep", "every", "free", "supervised", "wanted"),
    [
        (2, None, [3.7, 3.7], True, ""),
        (2, 5, [3.5, 3.7], True, f"on a; use --keep-checkpoints 1 or --lora or {DISKS}"),
        (
            2,
            5,
            [2.1, 3.7],
            True,
            "3.6 GB of disk, and 2.1 GB are free on a; use --lora or disks that are 2 GiB",
        ),
        (2, 25, [2.9, 2.9], False, ""),  # it writes one, and one more if it is stopped
        (2, 25, [2.7, 2.9], False, "1 or --lora or 1 GiB more: free space on the file system or"),
        (2, NEVER, [0.5, 0.5], True, ""),
        (2, NEVER, [0.3, 0.5], True, "the model needs 0.4 GB of disk, and 0.3 GB are free on a"),
        (1, None, [3.5, 3.5], True, COPIES),
        (1, None, [3.5, 3.5], False, ""),
    ],
)
def test_checkpoints_that_the_disk_can_not_hold_are_refused_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: int,
    every: int | None,
    free: list[float],
    supervised: bool,
    wanted: str,
) -> None:
    """A hundred million weights: each checkpoint has 1.2 GB."""
    if supervised:
        monkeypatch.setenv(FOLDER, str(tmp_path))
    with torch.device("meta"):
        model = torch.nn.Linear(10_000, 10_000)
    own, hosts = (
        threading.local(),
        [SimpleNamespace(facts=SimpleNamespace(hostname=n)) for n in "ab"],
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: own.usage)
    options = SimpleNamespace(keep_checkpoints=keep, checkpoint_every=every, lora=False)
    said = io.StringIO()

    def work(ranks: Ranks) -> str:
        own.usage = SimpleNamespace(free=int(free[ranks.rank] * 1e9))
        context = session(options, ranks, said, output=tmp_path, hardware=hosts)
        try:
            expect_checkpoints(context, model, 20, count_saved(model), keeps_best=False)
        except CheckpointError as error:
            return f"{error.message}; {error.hint}"
        return ""

    (text, other) = run_threaded(2, work)

    assert text == other
    assert wanted in text + said.getvalue()
    assert bool(text + said.getvalue()) is bool(wanted)


@pytest.mark.parametrize("halved", [False, True])
def test_the_first_checkpoint_of_a_large_model_may_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halved: bool
) -> None:
    """Also if its weights are in bf16 while it is trained."""
    with torch.device("meta"):
        model: Any = torch.nn.Linear(10_000, 25_000, bias=False)
    monkeypatch.setattr("jobs.worker.fast.optimizer.find_layers", lambda model: [model])
    assert not halved or halve_weights(model)
    said, options = io.StringIO(), SimpleNamespace(keep_checkpoints=1, checkpoint_every=None)
    with patch("shutil.disk_usage", return_value=SimpleNamespace(free=1e12)):
        context = session(options, Ranks(), said, output=tmp_path)
        expect_checkpoints(context, model, 9, 0, keeps_best=True)
    assert '"event": "checkpoint_estimate", "seconds": 30.5' in said.getvalue()


def test_adapters_are_saved_without_frozen_weights() -> None:
    model: Any = torch.nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    assert count_saved(model) == 48
    model.peft_config = {}
    assert count_saved(model) == 12


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved_steps(tmp_path, 2)
    (newest,) = list_checkpoints(tmp_path)
    load_state(newest, state, Ranks())
    other = state._replace(model=torch.nn.Linear(3, 2))
    for name, hint in (
        (FOLDER, "start over without --resume"),
        ("NONE", "by moving output.state/ away or, on Kubernetes, with another --job-name"),
    ):
        monkeypatch.delenv(FOLDER, raising=False)
        monkeypatch.setenv(name, str(tmp_path))
        with pytest.raises(CheckpointError, match="fit the model: size mismatch for") as refused:
            load_state(newest, other, Ranks())
        assert hint in (refused.value.hint or "")


def test_the_fused_optimizer_continues_a_checkpoint_of_compiled_layers(tmp_path: Path) -> None:
    """``--resume`` with ``--dtype fp32``, or on a node without a compiler, no longer compiles them."""
    state = saved_steps(tmp_path, 1)
    fused = torch.optim.AdamW(state.model.parameters(), 0.25, fused=True)
    load_state(list_checkpoints(tmp_path)[0], state._replace(optimizer=fused), Ranks())
    assert _clip_and_update(state.model, fused, Digits.demo)
    assert {int(each["step"]) for each in fused.state.values()} == {2}
    assert fused.param_groups[0]["lr"] == 0.25


def test_the_newest_checkpoint_stays_even_if_a_removal_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("999999", "1000000"):
        (state_folder(tmp_path) / f"checkpoints/step-{step}").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    prune(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000"]


def saved_steps(folder: Path, *steps: int) -> State:
    """Save a checkpoint after each step, and return the state of the last one."""
    model = torch.nn.Linear(3, 3)
    state = State(model, torch.optim.AdamW(model.parameters()), {})
    for step in steps:
        model(torch.ones(3)).sum().backward()
        state.optimizer.step()
        saved = Checkpoint(SAVED, replace(PROGRESS, step=step))
        run_threaded(1, partial(save_checkpoint, folder, saved, state))
    return state


@pytest.mark.parametrize("name", ["state.pt", "checkpoint.json"])
def test_a_changed_byte_anywhere_is_found(tmp_path: Path, name: str) -> None:
    saved_steps(tmp_path, 2)
    (folder,) = list_checkpoints(tmp_path)
    assert read_checkpoint(folder) == Checkpoint(SAVED, replace(PROGRESS, step=2))
    content = (folder / name).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[place] ^= 1
        (folder / name).write_bytes(changed)
        if name == "state.pt" or json.loads(content) != loaded(changed):
            with pytest.raises(CheckpointError, match="can't be read"):
                read_checkpoint(folder)


def loaded(content: bytearray) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_damaged_checkpoint_is_removed_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    saved_steps(tmp_path, 2, 4, 6)
    second, third, fourth = list_checkpoints(tmp_path)
    (third / "state.pt").unlink()
    (fourth / "checkpoint.json").unlink()
    notes: list[str] = []

    found = newest_undamaged(tmp_path, notes.append)

    assert found
    assert (found[0], found[1].progress.step) == (second, 2)
    assert list_checkpoints(tmp_path) == [second], "pruning would keep the damaged one"
    assert [f"step-{number:06d}" in note for number, note in zip((6, 4), notes, strict=True)]
    assert all(note.endswith("; it is removed, and the one before it is used") for note in notes)
    (second / "state.pt").write_bytes((second / "state.pt").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="step-000002 can't be read"):
        newest_undamaged(tmp_path, notes.append)
    assert list_checkpoints(tmp_path) == [second]
    assert newest_undamaged(tmp_path / "none", notes.append) is None


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.9] * 300, False),
        ([6 - 5 * n / 500 for n in range(500)], False),
        # By heart, and a peak now and then: far above it in parts, and nothing is wrong.
        ([0.01] * 200 + [1.5] * 300, False),
        ([1.2] * 200 + [8.0] * 60 + [1.2] * 200, False),
        # Back at chance.
        ([1.2] * 200 + [5.9] * 160, True),
        ([5.9] * 20 + [40.0] * 110, True),
        *(([5.9] * good + [40.0] * 140, True) for good in range(3, 8)),
        # Prices: the mean is far above most batches, and hardly any batch is near it.
        (SKEWED, False),
        ([*SKEWED[:200], *(50 * loss for loss in SKEWED[200:500])], True),
    ],
    ids=[
        "nothing",
        "learns",
        "by heart",
        "peak",
        "forgets all",
        "explodes",
        *(f"explodes after {good} steps" for good in range(3, 8)),
        "skewed",
        "skewed up",
    ],
)
def test_a_loss_that_is_far_too_high_for_long_is_divergence(
    losses: list[float], diverged: bool
) -> None:
    watch, seen = DivergenceDetector(), False
    for loss in losses:
        watch.see(loss)
        seen = seen or watch.diverged
    assert seen is diverged


def test_a_loss_is_suspicious_long_before_it_counts_as_diverged() -> None:
    watch = DivergenceDetector()
    for loss in [1.0] * 50 + [20.0] * 10:
        watch.see(loss)
    assert watch.suspicious
    assert not watch.diverged
    assert watch.high < PATIENCE


def watch_all(runs: np.ndarray[Any, Any]) -> tuple[int, list[int]]:
    """Return how many runs count as diverged, and the most steps in a row without checkpoints, sorted."""
    stops, held = 0, list[int]()
    for losses in runs.tolist():
        watch, seen, marks = DivergenceDetector(), False, ""
        for loss in losses:
            watch.see(loss)
            seen = seen or watch.diverged
            marks += "x" if watch.suspicious else " "
        stops += seen
        held.append(max(map(len, marks.split(" "))))
    return stops, sorted(held)


DRAWS = np.random.default_rng(0)


@pytest.mark.parametrize(
    "errors",
    [
        10 * DRAWS.normal(size=(80, 1000, 1)),
        DRAWS.lognormal(sigma=1.5, size=(80, 1000, 1)) - 3,
        DRAWS.lognormal(sigma=1.5, size=(80, 1000, 16)) - 3,
    ],
    ids=["normal", "skewed", "skewed means"],
)
def test_noise_alone_never_stops_a_run_and_keeps_checkpoints_back_for_few_steps(
    errors: np.ndarray[Any, Any],
) -> None:
    stops, held = watch_all(np.square(errors).mean(axis=2))
    assert stops == 0
    assert held[len(held) * 9 // 10] <= 30


@pytest.mark.parametrize(("mean", "spread"), [(3.5, 1.0), (4.0, 1.5), (4.0, 2.0)])
def test_a_collapse_stops_every_run(mean: float, spread: float) -> None:
    """Its limit is below 3."""
    draw = np.random.default_rng(0)
    good = draw.normal(1.0, 0.3, (40, 400))
    bad = draw.gamma((mean / spread) ** 2, spread**2 / mean, (40, 2000))
    assert watch_all(np.hstack([good, bad]))[0] == 40


@pytest.mark.parametrize(
    ("losses", "total", "at"),
    [
        ([5.9] * 3000, 1000, [500]),
        ([5.9] * 3000, 10_000, [2000]),
        ([6 - 2 * n / 500 for n in range(900)], 1000, []),
        ([5.9] * 300, 300, []),
    ],
    ids=["learns nothing", "a fifth of a long run", "learns", "too short to say"],
)
def test_a_loss_that_does_not_fall_is_noted_once(
    losses: list[float], total: int, at: list[int]
) -> None:
    watch, found = DivergenceDetector(), []
    for step, loss in enumerate(losses, start=1):
        watch.see(loss)
        if watch.is_stuck(total):
            found.append(step)
    assert found == at
