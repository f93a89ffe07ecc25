"""What evaluation while training costs, and what `--patience` saves: scores and CPU time of whole runs.

python -m benchmarks.early_stopping --data train.jsonl --eval unseen.jsonl --encoder FOLDER

`train classify` trains a pretrained encoder three times, each run in its own process with one thread: without
evaluation, with one after each epoch, and with `--patience 2`. The runs start together, so that other work on
the machine affects all of them. With patience, the model may be 0.3 points below the best epoch, and training
and evaluation may take 60 % of the time. An evaluation may cost 3 % of the training besides itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish
from benchmarks.squad_data import find_encoder

RUNS: dict[str, dict[str, Any]] = {
    "without": {"eval_every": "never"},
    "each epoch": {"eval_every": "epoch"},
    "patience": {"eval_every": "epoch", "patience": 2},
}
MOST_WORSE, MOST_TIME, MOST_COST = 0.3, 0.6, 0.03
_PROGRAM = """
import json, sys, time
from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.training import run
seconds = {"train": 0.0, "evaluate": 0.0}
def timed(name, function):
    def call(*arguments):
        begin = time.process_time()
        found = function(*arguments)
        if not (name == "evaluate" and seconds["train"]):  # that of the model, after training
            seconds[name] += time.process_time() - begin
        return found
    return call
run.train, Classify.evaluate = timed("train", run.train), timed("evaluate", Classify.evaluate)
code = run.run_task(Classify, ClassifyOptions.from_json(sys.argv[1]))
print("@seconds", json.dumps(seconds), flush=True)
sys.exit(code)
"""


def start(args: argparse.Namespace, folder: str, name: str) -> subprocess.Popen[str]:
    """Start one run."""
    options: dict[str, Any] = {
        "model": str(find_encoder(args.encoder)),
        "data": str(args.data),
        "eval": str(args.eval),
        "output": f"{folder}/{name}",
        "epochs": args.epochs,
        "backend": "gloo",
        "dtype": args.dtype,
        "token_cache": "none",
        "seed": args.seed,
    }
    argv = [sys.executable, "-c", _PROGRAM, json.dumps({**options, **RUNS[name]})]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str], output: Path) -> dict[str, Any]:
    """Wait for a run; return its CPU seconds, evaluations, and the model's accuracy."""
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(text)
    seconds = json.loads(text.rpartition("@seconds ")[2])
    results = json.loads((output / "results.json").read_text())
    accuracies = [round(each["accuracy"], 2) for each in results["evaluations"]]
    return {**seconds, "accuracy": round(results["accuracy"], 2), "evaluations": accuracies}


def main() -> None:
    """Print each run's figures, and what they miss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = {name: start(args, folder, name) for name in RUNS}
        found = {name: read(each, Path(folder, name)) for name, each in started.items()}
    print(json.dumps(found), flush=True)
    whole, ended = found["each epoch"], found["patience"]
    worse = max(whole["evaluations"]) - ended["accuracy"]
    share = ended["train"] / whole["train"]
    plain = found["without"]["train"]
    cost = (whole["train"] - whole["evaluate"] - plain) / plain
    missed = [f"at most {MOST_WORSE} below the best epoch"] if worse > MOST_WORSE else []
    missed += [f"{MOST_TIME:.0%} of the time"] if share > MOST_TIME else []
    missed += [f"{MOST_COST:.0%} besides the evaluation"] if cost > MOST_COST else []
    figures = {"worse": round(worse, 2), "time": round(share, 3), "cost": round(cost, 3)}
    finish(missed, benchmark="early_stopping", **figures)


if __name__ == "__main__":
    main()
