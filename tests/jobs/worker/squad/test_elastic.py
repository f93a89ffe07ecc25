"""A run that goes on with fewer ranks than planned learns from the same features in every step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.worker.runtime.process import PLANNED, RankIdentity
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.squad.optimizer_step import count_parts, weigh
from jobs.worker.squad.options import TrainOptions
from tests.jobs.worker.squad.forked_ranks import run_forked
from tests.jobs.worker.squad.test_resume import options
from tests.jobs.worker.squad.threaded_ranks import run_threaded


def steps(rank_losses: Path) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in rank_losses.read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens"]) for line in lines]


def test_a_run_that_loses_a_rank_goes_on_with_the_same_steps(
    nodes_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLANNED, "3")
    killed = options(nodes_folder, "killed")
    whole, lost, less = run_forked(
        [
            (options(nodes_folder, "whole"), {"ranks": 3}),
            (killed, {"ranks": 3, "rank": 2, "at": "step", "step": 6}),
            (replace(killed, resume=True), {"ranks": 2}),
        ]
    )
    assert whole.codes == [0] * 3, whole.texts
    assert 0 not in lost.codes
    assert less.codes == [0] * 2, less.texts
    assert "2 of 3 planned ranks: the same 6 features per step, 3 on each rank" in less.texts[0]
    files = [nodes_folder / name / "metrics" for name in ("whole", "killed")]
    found = [[steps(file) for file in sorted(folder.glob("rank-*.jsonl"))] for folder in files]
    # The ranks that went on have the steps after the loss from themselves.
    rest = range(5, len(found[0][0]))
    assert len(rest) > 1
    tokens = [[sum(rank[n][2] for rank in run) for n in rest] for run in (found[0], found[1][:2])]
    assert tokens[0] == tokens[1]
    losses = [[run[0][n][1] for n in rest] for run in found]
    # Dropout differs, nothing else does.
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(("features", "parts"), [(8, 2), (3, 2), (12, 4), (16, 4), (24, 6)])
def test_a_rank_with_more_features_computes_them_in_more_parts(features: int, parts: int) -> None:
    assert count_parts(TrainOptions(batch_size=8, accumulate=2), features) == parts


def test_every_feature_counts_the_same() -> None:
    def weight(ranks: Ranks) -> float:
        less = replace(ranks, identity=RankIdentity(ranks.rank, ranks.size, 3))
        return weigh(less, (4, 3)[ranks.rank])

    weights = run_threaded(2, weight)
    assert [weights[0] / 4, weights[1] / 3] == pytest.approx([2 / 7] * 2)
    assert run_threaded(2, lambda ranks: weigh(ranks, ranks.rank)) == [1.0, 1.0]
