"""A run that is killed and resumed is the run that was never killed: every loss and weight, to the bit."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs.squad.checkpoints import list_checkpoints
from jobs.squad.events import parse_event
from jobs.squad.options import DEMO, TrainOptions
from tests.jobs.squad.forked import Ran, run_forked

STEPS = 12
DISK_PER_CHECKPOINT = 4
"""State, description, the folder before its renaming, and the one above it afterwards."""


class Made(NamedTuple):
    """What a finished run has learned."""

    losses: list[list[tuple[int, float, int]]]
    """(step, loss, tokens) of each rank."""
    weights: bytes
    predictions: str
    results: dict[str, Any]


def made(output: Path, ranks: int = 2) -> Made:
    files = [output / "metrics" / f"rank-{rank}.jsonl" for rank in range(ranks)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    told = json.loads((output / "results.json").read_text())
    same = ("em", "f1", "loss_curve", "train_features", "world_size", "epochs")
    return Made(
        [[(each["step"], each["loss"], each["tokens"]) for each in rank] for rank in lines],
        (output / "model" / "model.safetensors").read_bytes(),
        (output / "predictions.json").read_text(),
        {name: told[name] for name in same},
    )


def options(folder: Path, output: str, **more: Any) -> TrainOptions:
    """Twelve steps of two ranks, three epochs, a checkpoint after every other one."""
    wish: dict[str, Any] = {"epochs": 3, "batch_size": 2, "checkpoint_every": 2, "backend": "gloo"}
    where = {"data": str(folder / "data.json"), "output": str(folder / output)}
    return replace(DEMO, **{**wish, **where, **more})


def events(ran: Ran, rank: int = 0) -> list[dict[str, Any]]:
    found = [parse_event(line) for line in ran.texts[rank].splitlines()]
    return [event for event in found if event]


def check_killed_and_resumed(folder: Path, kills: list[dict[str, Any]], ranks: int = 2) -> None:
    """Each kill is of a run of its own, which is then resumed; one more is never interrupted."""
    runs: list[tuple[TrainOptions, dict[str, Any]]] = [(options(folder, "whole"), {"ranks": ranks})]
    for number, kill in enumerate(kills):
        wish = options(folder, f"killed-{number}")
        runs.append((wish, {**kill, "ranks": ranks}))
        runs.append((replace(wish, resume=True), {"ranks": ranks}))
    whole, *others = run_forked(runs, folder)
    assert whole.codes == [0] * ranks, whole.texts
    expected = made(folder / "whole", ranks)
    assert [step for step, _, _ in expected.losses[0]] == list(range(1, 1 + len(expected.losses[0])))
    for number, kill in enumerate(kills):
        killed, resumed = others[2 * number : 2 * number + 2]
        assert -signal.SIGKILL in killed.codes, (kill, killed.texts)
        assert resumed.codes == [0] * ranks, (kill, resumed.texts)
        found = made(folder / f"killed-{number}", ranks)
        assert found.losses == expected.losses, kill
        assert found == expected, kill
        assert len(list_checkpoints(folder / f"killed-{number}")) == 2, kill
        assert not list((folder / f"killed-{number}" / "checkpoints").glob("*.partial"))


def test_killed_at_the_beginning_in_the_middle_and_at_the_end(nodes_folder: Path) -> None:
    steps = [{"at": "step", "step": step, "rank": step % 2} for step in (1, 6, STEPS)]
    check_killed_and_resumed(nodes_folder, steps)


def test_killed_while_a_checkpoint_is_written(nodes_folder: Path) -> None:
    second = DISK_PER_CHECKPOINT
    writes = range(second + 1, second + 1 + DISK_PER_CHECKPOINT)
    check_killed_and_resumed(nodes_folder, [{"at": "disk", "step": n} for n in writes])


def test_three_ranks_whose_sums_depend_on_their_order(nodes_folder: Path) -> None:
    check_killed_and_resumed(nodes_folder, [{"at": "step", "step": 6, "rank": 2}], ranks=3)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_step(nodes_folder: Path, rank: int) -> None:
    steps = [{"at": "step", "step": step, "rank": rank} for step in range(1, STEPS + 1)]
    check_killed_and_resumed(nodes_folder, steps)


@pytest.mark.full
def test_killed_at_every_write_to_the_disk(nodes_folder: Path) -> None:
    writes = range(1, STEPS // 2 * DISK_PER_CHECKPOINT + 1)
    check_killed_and_resumed(nodes_folder, [{"at": "disk", "step": n} for n in writes])
