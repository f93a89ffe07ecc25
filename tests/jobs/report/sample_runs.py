"""Invented results folders, in the format of real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from jobs.report.results_folder import PARTS


def make_results(ranks: int = 2, per_node: int = 1, **changes: Any) -> dict[str, Any]:
    """The ``results.json`` of a finished run."""
    place = {"cpus": "0-31", "threads": 32, "memory": "prefer:0", "workers": ""}
    seconds = {"load": 8.2, "tokenize": 21.5, "train": 800.0, "evaluate": 31.0, "save": 1.1}
    return {
        "em": 71.25,
        "f1": 80.5,
        "eval_records": 10570,
        "train_records": 87599,
        "train_samples": 88524,
        "loss_curve": [[step, 6 * math.exp(-step / 60) + 0.8] for step in range(1, 301)],
        "samples_per_second": 57.0 * ranks,
        "tokens_per_second": 9800.0 * ranks,
        "seconds": {**seconds, "total": 864.0},
        "world_size": ranks,
        "ranks": [
            {
                "rank": rank,
                "hostname": f"ip-172-31-0-{10 + rank // per_node}",
                "pid": 4000 + rank,
                "threads": 32,
                "cpus": 32,
                "planned": place,
                "found": place,
            }
            for rank in range(ranks)
        ],
        "backend": "gloo",
        "backend_reason": "the stack has no other",
        "dtype": "bf16",
        "dtype_reason": "every CPU has it in hardware",
        "amx": True,
        "batch_size_per_rank": 32,
        "epochs": 1,
        "learning_rate": 1e-4,
        "seed": 42,
        "model": "distilbert-base-uncased",
        "data": "squad (train)",
        "eval_data": "squad (validation)",
        "eval_digest": "3f9a",
        "versions": {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.23.0"},
        "recipe": "fast",
        **changes,
    }


def make_row(rank: int, step: int, slow: int | None = None) -> dict[str, Any]:
    """One line of a rank's metrics; a slow rank computes longer, and the others wait for it."""
    wave = math.sin(step / 9 + rank) * 0.02 + (3.0 if step == 1 else 0.0)
    busy = 1.15 if rank == slow else 1.0
    computing = {"data": 0.01, "forward": 0.5 * busy, "backward": 1.0 * busy + wave}
    communication = 0.45 - (0.225 if rank == slow else 0.0)
    seconds = {**computing, "communication": communication, "optimizer": 0.09}
    assert tuple(seconds) == PARTS
    noise = math.sin(step * 12.9898 + 4.1) * 0.4
    samples = 96 + round(18 * math.sin(step * 7.1 + rank))
    return {
        "step": step,
        "time": round(step * 2.12 + (3.0 if step else 0.0), 3),
        "loss": round(5.2 * math.exp(-step / 70) + 0.9 + noise * math.exp(-step / 300), 5),
        "lr": 1e-4 * min(step / 30, 1 - (step - 30) / 400),
        "samples": samples,
        "tokens": samples * 178,
        "padded": samples * 184,
        "seconds": seconds,
    }


def make_folder(
    folder: Path, ranks: int = 2, steps: int = 300, slow: int | None = None, **changes: Any
) -> Path:
    """Write a complete results folder."""
    (folder / "job" / "metrics").mkdir(parents=True)
    for rank in range(ranks):
        rows = (json.dumps(make_row(rank, step, slow)) for step in range(1, steps + 1))
        (folder / "job" / "metrics" / f"rank-{rank}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "results.json").write_text(json.dumps(make_results(ranks, **changes)))
    return folder
