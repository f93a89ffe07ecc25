"""A run that goes on with fewer ranks than planned learns from the same features in every step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.worker.runtime.process import PLANNED
from jobs.worker.tasks.squad.task import SquadOptions
from jobs.worker.training.optimizer_step import count_parts
from tests.jobs.worker.forked_ranks import run_forked
from tests.jobs.worker.training.test_resume import options


def steps(rank_losses: Path) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in rank_losses.read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens"]) for line in lines]


def test_a_run_that_loses_a_rank_goes_on_with_the_same_steps(
    nodes_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 3
    monkeypatch.setenv(PLANNED, str(ranks))
    killed = options(nodes_folder, "killed")
    whole, lost, less = run_forked(
        [
            (options(nodes_folder, "whole"), {"ranks": ranks}),
            (killed, {"ranks": ranks, "rank": ranks - 1, "at": "step", "step": 6}),
            (replace(killed, resume=True), {"ranks": ranks - 1}),
        ]
    )
    assert whole.codes == [0] * ranks, whole.texts
    assert 0 not in lost.codes
    assert less.codes == [0] * (ranks - 1), less.texts
    each = 2 * ranks // (ranks - 1)
    said = (
        f"{ranks - 1} of {ranks} planned ranks: the same {2 * ranks} features per step, {each} on"
    )
    assert said in less.texts[0]
    files = [nodes_folder / f"{name}.state" / "metrics" for name in ("whole", "killed")]
    found = [[steps(file) for file in sorted(folder.glob("rank-*.jsonl"))] for folder in files]
    # The ranks that went on have the steps after the loss from themselves.
    rest = range(5, len(found[0][0]))
    assert len(rest) > 1
    tokens = [
        [sum(rank[n][2] for rank in run) for n in rest] for run in (found[0], found[1][: ranks - 1])
    ]
    assert tokens[0] == tokens[1]
    losses = [[run[0][n][1] for n in rest] for run in found]
    # Dropout differs, nothing else does.
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(("features", "parts"), [(8, 2), (3, 2), (12, 4), (16, 4), (24, 6)])
def test_a_rank_with_more_features_computes_them_in_more_parts(features: int, parts: int) -> None:
    assert count_parts(SquadOptions(batch_size=8, accumulate=2), features) == parts
