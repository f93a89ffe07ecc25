"""Quality of `fast` on many texts: accuracy on unseen ones after equal training.

python -m benchmarks.quality_texts [--seeds 10] [--seen benchmarks/quality_texts.jsonl]
python -m benchmarks.quality_texts --attention-dropout on   (fast with dropout of attention weights)
python -m benchmarks.quality_texts --side int8              (fast with products in int8)

A pretrained encoder learns the section of a Debian package from its description, twice per seed and with the
same batch size, rate, and schedule: with the product's training, compiled, and with a plain script (random
batches padded to their longest text). The texts are those of `apt-cache dumpavail`,
about 47,000 in 18 sections. The same code scores both sides. There are enough unseen texts to resolve a
difference of 0.3 points, unlike the few questions of benchmarks.quality.

Each finished seed and side adds a line to `--seen` with the unseen texts that were right. A rerun continues
with the seeds that are missing for the same texts and settings; with all of them, it only summarizes.
`seconds` is CPU time of training, without that of the C++ compiler.

The interval of the difference is from samples of both the seeds and the texts, as in benchmarks.quality.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish
from benchmarks.quality import MOST_WORSE, Curve, interval, require_environment, train
from benchmarks.squad_data import find_encoder
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks.classify import Classify, ClassifyOptions, Labeled
from jobs.worker.training.task import Data, Loaded

LENGTH = 128
FEWEST = 1000
"""Sections with fewer texts are left out.

One epoch may teach all of a small section or nothing of it, by chance: with all sections of at least 100
texts, accuracy varies by 1.5 points between seeds of one side.
"""


def read_packages() -> list[dict[str, str]]:
    """Return the packages' descriptions with their sections, in random order."""
    command = ["apt-cache", "dumpavail"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for package in known.split("\n\n"):
        fields = dict(re.findall(r"^(Description|Section): (.+)$", package, re.M))
        if len(fields) == 2:
            found.setdefault(fields["Description"], fields["Section"])
    if not found:
        raise SystemExit("no package lists: apt-get update")
    draw, texts = random.Random(1), sorted(found)
    draw.shuffle(texts)
    rows = []
    for section, _ in Counter(found.values()).most_common():
        rows += [{"text": text, "label": section} for text in texts if found[text] == section]
    draw.shuffle(rows)
    return rows


class Texts:
    """Descriptions with their sections: to learn, and unseen."""

    def __init__(self, args: argparse.Namespace) -> None:
        rows = read_packages()
        counts = Counter(row["label"] for row in rows)
        rows = [row for row in rows if counts[row["label"]] >= FEWEST]
        self.names = sorted({row["label"] for row in rows})
        self.unseen, rest = rows[: args.unseen], rows[args.unseen :]
        self.train = rest[: args.texts]
        digest = blake2b(json.dumps([self.unseen, self.train]).encode(), digest_size=8)
        self.setup = {
            "texts": len(self.train),
            "unseen": len(self.unseen),
            "sections": len(self.names),
            "digest": digest.hexdigest(),
            "batch_size": args.batch_size,
            "learning_rate": args.learning_rate,
            "dtype": args.dtype,
        }


def learn(
    args: argparse.Namespace, texts: Texts, ranks: Ranks, seed: int, side: str
) -> dict[str, Any]:
    """Train one side for an epoch; return its CPU seconds, accuracy, and which unseen texts are right."""
    import torch

    from jobs.worker.fast.compilation import plain_layers
    from jobs.worker.training.batches import TrainingRun

    options = ClassifyOptions(
        model=str(find_encoder(args.encoder)),
        epochs=1,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=seed,
        backend="gloo",
        attention_dropout=dropout_of(args, side),
        compile="on",
        token_cache="none",
    )
    torch.manual_seed(seed)
    precision = Precision(args.dtype, "", int8=side == "int8")
    session = RankContext(options, ranks, Events(0, io.StringIO()), precision)
    task = Classify(options)
    task.classes = texts.names
    records, unseen = (
        [Labeled((row["text"],), (row["label"],), "") for row in rows]
        for rows in (texts.train, texts.unseen)
    )
    loaded = task.load(session, Data(records, "", unseen, ""))
    if side != "baseline":
        run = TrainingRun(session, task, loaded, task.prepare(session, loaded, records))
        begin = time.process_time()
        train(run, lambda _: None)
        seconds = time.process_time() - begin
        plain_layers(loaded.model)
        torch._dynamo.reset()
    else:
        rows = [
            {
                **loaded.tokenizer(row["text"], truncation=True, max_length=LENGTH),
                "labels": texts.names.index(row["label"]),
            }
            for row in texts.train
        ]
        begin = time.process_time()
        train_plainly(args, loaded, rows, seed)
        seconds = time.process_time() - begin
    right = test(session, loaded, task.prepare(session, loaded, unseen))
    return {
        "accuracy": round(100 * float(right.mean()), 3),
        "seconds": round(seconds, 1),
        "right": base64.b64encode(np.packbits(right).tobytes()).decode(),
    }


def train_plainly(
    args: argparse.Namespace, loaded: Loaded, encoded: Sequence[dict[str, Any]], seed: int
) -> None:
    """Train an epoch as a plain script does: shuffled batches, padded to the longest, a linear schedule."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    model, size, rows = loaded.model, args.batch_size, list(encoded)
    steps = -(-len(rows) // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    random.Random(seed).shuffle(rows)
    for first in range(0, len(rows), size):
        batch = loaded.tokenizer.pad(rows[first : first + size], return_tensors="pt")
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def dropout_of(args: argparse.Namespace, side: str) -> str:
    return "on" if side == "baseline" else args.attention_dropout


def test(session: RankContext[ClassifyOptions], loaded: Loaded, samples: Any) -> Any:
    """Return which samples the model classifies right."""
    from jobs.worker.training.evaluation import plan_batches, run_batches

    right = np.zeros(len(samples), dtype=bool)
    batches = plan_batches(samples.lengths)
    for chosen, output in run_batches(loaded, samples, batches, session.autocast()):
        right[chosen] = output.logits.argmax(dim=-1).numpy() == samples.targets[chosen]
    return right


def read_seen(args: argparse.Namespace, setup: dict[str, Any]) -> dict[tuple[int, str], Any]:
    """Return the lines for the same texts and settings, by seed and side."""
    lines = args.seen.read_text().splitlines() if args.seen.exists() else []
    return {
        (line["seed"], line["side"]): line
        for line in map(json.loads, lines)
        if line["setup"] == setup and line["attention_dropout"] == dropout_of(args, line["side"])
    }


def curve_of(line: dict[str, Any]) -> Curve:
    """Return a line's accuracy, seconds, and every text's score."""
    packed = np.frombuffer(base64.b64decode(line["right"]), dtype=np.uint8)
    right = 100.0 * np.unpackbits(packed, count=line["setup"]["unseen"])
    return Curve([line["accuracy"]], [line["seconds"]], right.tolist())


def main() -> None:
    """Run the missing seeds of both sides; print accuracies, their difference, and the ratio of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seen", type=Path, default=ROOT / "benchmarks" / "quality_texts.jsonl")
    parser.add_argument("--texts", type=int, default=12_000, help="to learn")
    parser.add_argument("--unseen", type=int, default=35_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--attention-dropout", choices=("on", "off"), default="off")
    parser.add_argument("--side", choices=("fast", "int8"), default="fast")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    require_environment("benchmarks.quality_texts", args.threads)
    texts = Texts(args)
    sides = "baseline", args.side
    wanted = [(seed, side) for seed in range(1, args.seeds + 1) for side in sides]
    with join("gloo", environ={}) as ranks:
        for seed, side in wanted:
            if (seed, side) in read_seen(args, texts.setup):
                continue
            line = {"seed": seed, "side": side, "attention_dropout": dropout_of(args, side)}
            line |= {"setup": texts.setup, **learn(args, texts, ranks, seed, side)}
            with args.seen.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps({name: line[name] for name in line if name != "right"}), flush=True)
    found = read_seen(args, texts.setup)
    curves = {side: [curve_of(found[each]) for each in wanted if each[1] == side] for side in sides}
    summarize(args, texts.setup, curves)


def summarize(
    args: argparse.Namespace, setup: dict[str, Any], curves: dict[str, list[Curve]]
) -> None:
    scores, seconds = (
        {side: [getattr(each, name)[0] for each in found] for side, found in curves.items()}
        for name in ("f1", "seconds")
    )
    differences = [f - b for f, b in zip(scores[args.side], scores["baseline"], strict=True)]
    both = interval(curves[args.side], curves["baseline"])
    missed = []
    if both[0] < -MOST_WORSE:
        missed.append(f"with 95 % confidence at most {MOST_WORSE} below the baseline")
    finish(
        missed,
        benchmark="quality_texts",
        accuracy_of_seeds=scores,
        accuracy={side: round(statistics.mean(found), 2) for side, found in scores.items()},
        differences_of_seeds=[round(each, 2) for each in differences],
        difference=round(statistics.mean(differences), 3),
        difference_95_percent=both,
        faster=round(sum(seconds["baseline"]) / sum(seconds[args.side]), 3),
        attention_dropout=args.attention_dropout,
        threads=args.threads,
        **setup,
    )


if __name__ == "__main__":
    main()
