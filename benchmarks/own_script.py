"""transformers' own text classification script on two ranks, as it is and with one line added: `speed_up`.

python -m benchmarks.own_script --script run_classification.py [--texts passages] [--shape distilbert]

The line goes before the one that calls `trainer.train`. Both scripts get the same arguments, data, and order
of batches. Speeds are those between two steps' log lines, in rounds in turn. Loss curves come from runs
without dropout, whose masks differ: the added line must not lead further from the curve in fp32 than bf16
alone does.

`descriptions`: sections of Debian packages, as in benchmarks.tasks, of about 10 tokens, which the script pads
to 128. `passages`: SQuAD's, of 128 tokens, with their articles' titles: nothing is padded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import ROOT, finish
from benchmarks.squad_data import DATA, SHAPES, find_encoder, load_tokenizer, new_model
from benchmarks.squad_speed import preload
from benchmarks.tasks import BATCH, RATE, read_packages
from tests.jobs.worker.training.test_run import free_port

RANKS, LENGTH = 2, 128
BAR_SPEED, BAR_NOISE = 1.8, 1.5
LINE = "from spr_cluster import speed_up; speed_up(trainer)"
IMPORTS = ROOT / "jobs/worker/program/imports"
METRIC = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        kinds = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(kinds))

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""


class Trained(NamedTuple):
    """A run: the loss of each step; after the first steps, all ranks' samples per second.

    ``cpu_speed`` counts the first rank's CPU seconds instead, and so depends less on other work.
    """

    losses: list[float]
    speed: float
    cpu_speed: float


def main() -> None:
    """Run the sides in turn; print the ratio of their speeds, and how far their losses are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", type=Path, required=True, help="run_classification.py")
    parser.add_argument("--texts", choices=("descriptions", "passages"), default="descriptions")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--encoder", type=Path, help="a model's folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=20, help="steps before the measurement")
    parser.add_argument("--curve-steps", type=int, default=100)
    parser.add_argument("--no-curves", action="store_true", help="measure only the speed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args)
        play = Player(folder, args)
        plain, fast, by_cpu = [], [], []
        for _ in range(args.rounds):
            before = play("plain", "model", "bf16", args.steps)
            after = play("fast", "model", "bf16", args.steps)
            plain.append(before.speed)
            fast.append(after.speed)
            by_cpu.append(after.cpu_speed / before.cpu_speed)
            print({"plain": before[1:], "fast": after[1:]}, flush=True)
        ratio = statistics.median(b / a for a, b in zip(plain, fast, strict=True))
        missed = [f"{BAR_SPEED} times as fast"] if ratio < BAR_SPEED else []
        curves: dict[str, Any] = {}
        if not args.no_curves:
            steps = args.curve_steps
            exact = play("plain", "even", "fp32", steps).losses
            found = {side: play(side, "even", "bf16", steps).losses for side in ("plain", "fast")}
            apart = {side: mean_distance(losses, exact) for side, losses in found.items()}
            if apart["fast"] > BAR_NOISE * apart["plain"]:
                missed.append("losses within bf16's noise")
            tenth = max(1, steps // 10)
            ends = {side: round(statistics.mean(each[-tenth:]), 4) for side, each in found.items()}
            curves = {
                "first_losses": round(statistics.mean(exact[:tenth]), 4),
                "last_losses": {"fp32": round(statistics.mean(exact[-tenth:]), 4), **ends},
                "distance_from_fp32": {side: round(each, 6) for side, each in apart.items()},
            }
        finish(
            missed,
            benchmark="own_script",
            script=args.script.name,
            texts=args.texts,
            shape=args.shape or "minilm, pretrained",
            samples_per_second={"plain": plain, "fast": fast},
            ratio=round(ratio, 2),
            ratio_by_cpu_seconds=round(statistics.median(by_cpu), 2),
            **curves,
        )


def mean_distance(losses: list[float], others: list[float]) -> float:
    return statistics.mean(abs(a - b) for a, b in zip(losses, others, strict=True))


def write_inputs(folder: Path, args: argparse.Namespace) -> None:
    """Write both scripts, the data, the metric, and the model with its own dropout and without."""
    text = args.script.read_text()
    changed, count = re.subn(r"^( *)(.*trainer\.train\()", rf"\1{LINE}\n\1\2", text, flags=re.M)
    if count != 1:
        raise SystemExit(f"{args.script} has {count} lines that call trainer.train")
    (folder / "plain.py").write_text(text)
    (folder / "fast.py").write_text(changed)
    (folder / "accuracy").mkdir()
    (folder / "accuracy/accuracy.py").write_text(METRIC)
    rows = read_packages() if args.texts == "descriptions" else read_passages()
    for part, chosen in (("train", rows[64:]), ("dev", rows[:64])):
        lines = [json.dumps({"sentence": row["text"], "label": row["label"]}) for row in chosen]
        (folder / f"{part}.json").write_text("\n".join(lines))
    encoder = find_encoder(args.encoder)
    if args.shape:
        model = new_model(args.shape, attention_dropout=True)
        model.save_pretrained(folder / "model")
        load_tokenizer(encoder).save_pretrained(folder / "model")
    else:
        shutil.copytree(encoder, folder / "model")
    shutil.copytree(folder / "model", folder / "even")
    path = folder / "even/config.json"
    config = json.loads(path.read_text())
    config |= {name: 0.0 for name in config if "dropout" in name and config[name]}
    if config["model_type"] == "distilbert":
        config["seq_classif_dropout"] = 0.0
    path.write_text(json.dumps(config))


def read_passages() -> list[dict[str, str]]:
    """Return SQuAD's passages with the titles of their articles."""
    found = json.loads((DATA / "train.json").read_text())["data"]
    rows = [
        {"text": passage["context"], "label": article["title"]}
        for article in found
        for passage in article["paragraphs"]
    ]
    random.Random(1).shuffle(rows)
    return rows


class Player:
    """Runs a script as `spr-cluster run` does: a process per rank, each on a CPU, with tcmalloc."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._skip = folder, args.skip

    def __call__(self, side: str, model: str, dtype: str, steps: int) -> Trained:
        port, folder = free_port(), self._folder
        argv = [
            sys.executable,
            str(folder / f"{side}.py"),
            "--do_train",
            f"--output_dir={folder}/o",
        ]
        argv += [f"--model_name_or_path={folder / model}", f"--train_file={folder}/train.json"]
        argv += [f"--validation_file={folder}/dev.json", f"--metric_name={folder}/accuracy"]
        argv += [f"--max_steps={steps}", f"--per_device_train_batch_size={BATCH}"]
        argv += [f"--learning_rate={RATE}", "--logging_steps=1", "--disable_tqdm=true"]
        argv += ["--save_strategy=no", "--report_to=none", "--log_level=error"]
        argv += ["--text_column_names=sentence", "--use_cpu"]
        argv += ["--bf16"] if dtype == "bf16" else []
        environ = {
            **os.environ,
            **preload(),
            "PYTHONPATH": str(IMPORTS),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(folder / "cache"),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "ACCELERATE_USE_CPU": "true",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "SPR_OUTPUT": str(folder / "output"),
        }
        cpus = sorted(os.sched_getaffinity(0))
        share = len(cpus) // RANKS
        running = [
            subprocess.Popen(
                [
                    "taskset",
                    "-c",
                    ",".join(map(str, cpus[rank * share : (rank + 1) * share])),
                    *argv,
                ],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        # The other ranks' output must not fill their pipes.
        others = [threading.Thread(target=each.communicate) for each in running[1:]]
        for each in others:
            each.start()
        try:
            times = self._read(running[0])
        finally:
            for rank in running:
                rank.kill()
        state = json.loads((folder / "o/trainer_state.json").read_text())
        losses = [each["loss"] for each in state["log_history"] if "loss" in each]
        samples = (steps - self._skip) * BATCH * RANKS
        spent = [end - begin for end, begin in zip(times[-1], times[self._skip - 1], strict=True)]
        return Trained(losses, *(round(samples / each, 2) for each in spent))

    def _read(self, first: subprocess.Popen[str]) -> list[tuple[float, float]]:
        """Return the time and the CPU seconds when the first rank printed each step's loss."""
        times, said = [], []
        assert first.stdout is not None
        for line in first.stdout:
            said.append(line)
            if line.startswith("{'loss'"):
                used = Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()
                ticks = int(used[11]) + int(used[12])
                times.append((time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK")))
        if first.wait(60):
            raise SystemExit(f"the script failed: {''.join(said)[-3000:]}")
        return times


if __name__ == "__main__":
    main()
