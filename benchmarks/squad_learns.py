"""F1 of `train squad`: a pretrained encoder, real SQuAD questions, three nodes.

python -m benchmarks.squad_learns --data train.json --eval dev.json --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT, finish, left_behind, run_timed

DEADLINE_S = 7200


def main() -> None:
    """Run up, train almost without learning, train, and down; print F1 of both trainings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="SQuAD v1.1 JSON to train on")
    parser.add_argument("--eval", required=True, help="SQuAD v1.1 JSON to evaluate on")
    parser.add_argument("--model", required=True, help="folder of a pretrained encoder")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()
    shared = ["--data", args.data, "--eval", args.eval, "--model", args.model]
    shared += ["--batch-size", str(args.batch_size)]
    with tempfile.TemporaryDirectory() as home:
        call = _caller(Path(home, "spr"))
        try:
            call("up", "--nodes", str(args.nodes), "--cloud", "local")
            call(*_train(home, "untrained"), *shared, "--max-steps=1", "--learning-rate=1e-8")
            call(
                *_train(home, "trained"),
                *shared,
                f"--epochs={args.epochs}",
                f"--learning-rate={args.learning_rate}",
            )
            results = [
                json.loads(Path(home, n, "results.json").read_text())
                for n in ("untrained", "trained")
            ]
            call("down")
        finally:
            call("local", "reset", "--keep-base")
    before, after = results
    finish(
        [] if after["f1"] >= 40 else ["F1 of at least 40"],
        benchmark="squad_learns",
        limit_f1=40,
        f1_untrained=before["f1"],
        f1=after["f1"],
        em=after["em"],
        eval_records=after["eval_records"],
        epochs=after["epochs"],
        world_size=after["world_size"],
        hosts=sorted({rank["hostname"] for rank in after["ranks"]}),
        backend=after["backend"],
        dtype=after["dtype"],
        train_s=after["seconds"]["train"],
        samples_per_second=after["samples_per_second"],
        left_behind=left_behind(),
    )


def _train(home: str, name: str) -> list[str]:
    return ["train", "squad", "--results", str(Path(home, name))]


def _caller(home: Path) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        argv = [sys.executable, "-m", "jobs", *arguments]
        return run_timed(argv, ROOT, DEADLINE_S, SPR_CLUSTER_HOME=str(home))[1]

    return call


if __name__ == "__main__":
    main()
