"""Runs whose layers are frozen, or learn at different rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from jobs.worker.training.checkpoints import list_checkpoints
from tests.jobs.worker.forked_ranks import run_forked
from tests.jobs.worker.training.test_resume import error_of, options

RATE = 1e-3
PARTS = {".embeddings.": 0.25, ".layer.0.": 0.5, "qa_outputs.": 1.0}
"""Each part's share of the rate with half of it per layer."""


def weights(output: Path) -> dict[str, dict[str, Any]]:
    saved = load_file(output / "model" / "model.safetensors")
    return {part: {n: each for n, each in saved.items() if part in n} for part in PARTS}


def test_layers_are_frozen_or_learn_at_their_own_rates(nodes_folder: Path) -> None:
    folder = nodes_folder
    one: dict[str, Any] = {"max_steps": 1, "warmup_ratio": 0.0, "checkpoint_every": 1}
    one |= {"learning_rate": RATE}
    before, decayed, frozen, refused = run_forked(
        [
            (options(folder, name, **{**one, **more}), {"ranks": 1})
            for name, more in (
                ("before", {"learning_rate": 1e-8}),
                ("decayed", {"layer_decay": 0.5}),
                ("frozen", {"freeze_layers": "1"}),
                ("refused", {"freeze_layers": "2"}),
            )
        ]
    )
    for ran in (before, decayed, frozen):
        assert ran.codes == [0], ran.texts
    start, moved, kept = (weights(folder / each) for each in ("before", "decayed", "frozen"))
    for part, share in PARTS.items():
        # Adam's first step is the rate times the gradient's sign.
        farthest = max(
            float((moved[part][n] - each).abs().max()) for n, each in start[part].items()
        )
        assert abs(farthest - share * RATE) < 0.02 * RATE, part
        same = [torch.allclose(kept[part][n], each, atol=1e-7) for n, each in start[part].items()]
        assert all(same) if share < 1 else not any(same), part
    (checkpoint,) = list_checkpoints(folder / "frozen")
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    assert all(name.startswith("qa_outputs.") for name in state["model"])
    assert sum(len(each["params"]) for each in state["optimizer"]["param_groups"]) == 2
    assert error_of(refused) == "--freeze-layers 2 is more than the model's layers: 1"
