"""`train score` and distillation against a plain script and a teacher.

python -m benchmarks.teachers rank [--seeds 3]
python -m benchmarks.teachers distill

`rank`: a reranker learns SQuAD's questions, each with its passage and another one of the same article, with
`train score --objective ranking` and with a script of sentence-transformers' CrossEncoderTrainer: the same
encoder, batches of eight questions, rate, schedule, precision, and loss (ListNetLoss, with labels that make
it the cross-entropy of the positive). Both rank each question of the unseen articles among ten passages.

`distill`: six layers learn the section of a Debian package from its description, as in
benchmarks.quality_texts; two of them learn from those (`--teacher`, `--student-layers 2`), and `alone`
without their outputs. Speed is CPU time of the same unseen texts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish
from benchmarks.quality_texts import FEWEST, read_packages
from benchmarks.squad_data import DATA, find_encoder

BATCH, RATE, LENGTH, CANDIDATES = 8, 1e-4, 96, 10
LEAST_SHARE, LEAST_FASTER = 0.95, 2.5
Rows = list[dict[str, Any]]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_engine(task: str, output: Path, **options: Any) -> dict[str, Any]:
    """Train as one rank with one thread; return the results."""
    given = {"output": str(output), "token_cache": "none", "report_to": "none", **options}
    argv = [sys.executable, "-m", "worker.tasks", task, json.dumps(given)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "jobs"), "HF_HUB_OFFLINE": "1"}
    environ |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{task} failed: {done.stdout[-2000:]}")
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    return found


def read_questions(name: str, negatives: int) -> Rows:
    """Return each question with its passage and others: of its article, and then of any."""
    draw, rows = random.Random(1), []
    articles = json.loads((DATA / f"{name}.json").read_text())["data"]
    every = [passage["context"].strip() for each in articles for passage in each["paragraphs"]]
    for article in articles:
        near = [passage["context"].strip() for passage in article["paragraphs"]]
        for passage in article["paragraphs"]:
            right = passage["context"].strip()
            others = [each for each in near if each != right]
            far = [each for each in every if each not in near]
            for question in passage["qas"]:
                chosen = draw.sample(others, min(negatives, len(others)))
                chosen += draw.sample(far, negatives - len(chosen))
                row = {"query": question["question"].strip(), "positive": right, "neg": chosen}
                rows.append(row)
    return rows


def rank_with_script(encoder: str, train: Rows, unseen: Rows, seed: int, output: Path) -> float:
    """Train with CrossEncoderTrainer; return MRR in percent."""
    import numpy as np
    import torch
    from datasets import Dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import ListNetLoss

    from jobs.worker.data.groups import Group
    from jobs.worker.training.scores import score_rankings

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = CrossEncoder(encoder, num_labels=1, max_length=LENGTH, device="cpu")
    rows = [
        {
            "query": row["query"],
            "docs": [row["positive"], *row["neg"]],
            # Their softmax is 1 and zeros.
            "labels": [1000.0] + [0.0] * len(row["neg"]),
        }
        for row in train
    ]
    given = CrossEncoderTrainingArguments(
        output_dir=str(output),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        warmup_steps=len(rows) // BATCH // 10,
        bf16=True,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    CrossEncoderTrainer(
        model=model, args=given, train_dataset=Dataset.from_list(rows), loss=ListNetLoss(model)
    ).train()
    groups = [Group((row["query"], row["positive"], *row["neg"])) for row in unseen]
    pairs = [(group.texts[0], text) for group in groups for text in group.texts[1:]]
    with torch.autocast("cpu", torch.bfloat16):
        found = model.predict(pairs, show_progress_bar=False)
    figures, _ = score_rankings(groups, np.asarray(found, dtype=np.float32))
    return float(figures["mrr"])


def rank(args: argparse.Namespace, folder: Path) -> None:
    encoder = str(find_encoder(args.encoder))
    train = read_questions("train", args.negatives)
    train = random.Random(2).sample(train, min(args.questions, len(train)))
    unseen = read_questions("dev", CANDIDATES - 1)
    unseen = random.Random(2).sample(unseen, min(args.unseen, len(unseen)))
    files = {
        "data": write(folder / "train.jsonl", train),
        "eval": write(folder / "dev.jsonl", unseen),
    }
    options: dict[str, Any] = {
        "objective": "ranking",
        "model": encoder,
        "epochs": 1,
        "dtype": "bf16",
    }
    options |= {"batch_size": BATCH, "learning_rate": RATE, "max_length": LENGTH, **files}
    scores: dict[str, list[float]] = {"train score": [], "script": []}
    for seed in range(1, args.seeds + 1):
        output = folder / f"{seed}"
        found = run_engine("score", output, seed=seed, attention_dropout="on", **options)
        scores["train score"].append(found["scores"]["mrr"])
        scores["script"].append(rank_with_script(encoder, train, unseen, seed, folder / "script"))
        print({side: each[-1] for side, each in scores.items()}, flush=True)
    means = {side: round(statistics.mean(each), 2) for side, each in scores.items()}
    spread = max(max(each) - min(each) for each in scores.values())
    missed = []
    if means["train score"] < means["script"] - spread:
        missed.append(f"the script's MRR within the spread of seeds, {spread:.1f}")
    finish(
        missed,
        benchmark="teachers rank",
        mrr=scores,
        means=means,
        spread=round(spread, 2),
        questions=len(train),
        unseen=len(unseen),
    )


def seconds_of(model: Path, texts: list[str]) -> float:
    """Return the CPU seconds to classify texts with a model."""
    import torch

    from jobs.worker.tasks.predict import load_trained
    from jobs.worker.training.text_task import Row

    torch.set_num_threads(1)
    task, loaded = load_trained(str(model))
    rows = [Row("", {"text": text}) for text in sorted(texts, key=len)]
    task.predict(loaded, rows[:100])
    begin = time.process_time()
    task.predict(loaded, rows)
    return time.process_time() - begin


def distill(args: argparse.Namespace, folder: Path) -> None:
    rows = read_packages()
    count = Counter(row["label"] for row in rows)
    rows = [row for row in rows if count[row["label"]] >= FEWEST][: args.texts + args.unseen]
    unseen, train = rows[: args.unseen], rows[args.unseen :]
    options: dict[str, Any] = {
        "data": write(folder / "train.jsonl", train),
        "eval": write(folder / "dev.jsonl", unseen),
        "batch_size": 32,
        "learning_rate": 2e-4,
        "dtype": "bf16",
        "eval_every": "never",
    }
    encoder = str(find_encoder(args.encoder))
    models = {name: folder / name / "model" for name in ("teacher", "student", "alone")}
    found = {
        "teacher": run_engine("classify", folder / "teacher", model=encoder, epochs=2, **options)
    }
    taught = {"teacher": str(models["teacher"]), "student_layers": 2, "epochs": args.epochs}
    for name, alpha in (("student", args.alpha), ("alone", 1.0)):
        found[name] = run_engine(
            "classify", folder / name, distill_alpha=alpha, **taught, **options
        )
    scores = {name: each["scores"]["accuracy"] for name, each in found.items()}
    texts = [row["text"] for row in unseen]
    seconds = {
        name: min(seconds_of(models[name], texts) for _ in range(3))
        for name in ("teacher", "student")
    }
    faster = seconds["teacher"] / seconds["student"]
    missed = []
    if scores["student"] < LEAST_SHARE * scores["teacher"]:
        missed.append(f"{100 * LEAST_SHARE:.0f} % of the teacher's accuracy")
    if faster < LEAST_FASTER:
        missed.append(f"{LEAST_FASTER} times the teacher's speed")
    share = round(scores["student"] / scores["teacher"], 4)
    finish(
        missed,
        benchmark="teachers distill",
        accuracy=scores,
        share=share,
        faster=round(faster, 2),
        alpha=args.alpha,
        texts=len(train),
        unseen=len(unseen),
    )


def main() -> None:
    """Run one comparison; print its figures and the bars that were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rank", "distill"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=1000, help="at most, to learn, for rank")
    parser.add_argument("--negatives", type=int, default=1, help="for each question, for rank")
    parser.add_argument("--texts", type=int, default=12_000, help="to learn, for distill")
    parser.add_argument("--unseen", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=4, help="of the student")
    parser.add_argument("--alpha", type=float, default=0.5, help="of the student")
    parser.add_argument("--encoder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        {"rank": rank, "distill": distill}[args.what](args, Path(name))


if __name__ == "__main__":
    main()
