"""Seconds from the start of a rank's process to its tenth step, without and with compiled code in the cache.

python -m benchmarks.first_steps [--batch-size 2] [--rounds 3]

The rank is one of `train squad`, with all CPUs and a model of DistilBERT's shape. Submission and launch are
not included. ``parts`` are medians with compiled code. The default batch is small because this measures the
start: larger batches add only their own compute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.common import ROOT, finish
from benchmarks.squad_data import add_arguments, find_encoder, load_tokenizer, new_model
from benchmarks.squad_speed import preload
from jobs.worker.runtime.events import parse_event
from jobs.worker.tasks.squad.task import SquadOptions

STEPS = 10
MOST_SECONDS = 12.0
ENDS = {
    "start": "load",
    "load": "tokenize",
    "tokenize": "train",
    "prepare": "fast",
    "first_step": "1",
    "other_steps": "save",
}
"""What a rank reports at the end of each part: the next phase, a note, or a step."""


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        new_model("distilbert", attention_dropout=True).save_pretrained(model)
        load_tokenizer(find_encoder(args.encoder)).save_pretrained(model)
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(seconds_by_part(args, model, cache))
                warm.append(seconds_by_part(args, model, cache))
    totals = {
        name: statistics.median(sum(each.values()) for each in found)
        for name, found in (("cold", cold), ("warm", warm))
    }
    parts = {name: statistics.median(each[name] for each in warm) for name in ENDS}
    finish(
        [f"{MOST_SECONDS:.0f} s"] if totals["warm"] > MOST_SECONDS else [],
        benchmark="first_steps",
        **{name: round(value, 1) for name, value in totals.items()},
        parts={name: round(value, 1) for name, value in parts.items()},
        batch_size=args.batch_size,
        dtype=args.dtype,
    )


def seconds_by_part(args: argparse.Namespace, model: Path, cache: str) -> dict[str, float]:
    """Start a rank that keeps compiled code in ``cache``, and return how long each part took."""
    options = SquadOptions(
        data=str(args.data),
        model=str(model),
        token_cache="none",
        output=str(model.parent / "output"),
        batch_size=args.batch_size,
        dtype=args.dtype,
        max_steps=STEPS,
        compile="on",
    )
    argv = [sys.executable, "-m", "worker.tasks", "squad", options.to_json()]
    environ = {**os.environ, **preload(), "PYTHONPATH": str(ROOT / "jobs"), "HF_HUB_OFFLINE": "1"}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "GLOO_SOCKET_IFNAME": "lo"}
    ends, begin = dict[str, float](), time.time()
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        for line in rank.stdout:
            if event := parse_event(line):
                what = str(event.get("name") or event.get("text") or event.get("step"))
                ends.setdefault(what.split(":")[0], event["at"])
            if ENDS["other_steps"] in ends:
                rank.kill()
    if ENDS["other_steps"] not in ends:
        raise SystemExit("the rank failed")
    times = [begin, *(ends[each] for each in ENDS.values())]
    return {part: end - last for part, (last, end) in zip(ENDS, pairwise(times), strict=True)}


if __name__ == "__main__":
    main()
