"""`train lm`: the memory that it predicts, and its speed against peft with transformers' Trainer.

python -m benchmarks.lm memory [--shapes 10m,60m,135m,300m,1b]
python -m benchmarks.lm speed [--shape 135m] [--length 512] [--batch-size 4] [--rounds 5]

Weights are random. `memory` trains each shape for two steps as one rank in its own process, with the
allocator of the nodes (tcmalloc), and compares its peak with the note before training. `speed` trains the
same adapters on both sides, in bf16 with two threads: the base is in bf16 files, as most language models
are, which Trainer loads as they are. Both get the same tokens, in alternating rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import ROOT, finish
from benchmarks.squad_speed import preload
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.lm.task import Lm

MEMORY_BAR, SPEED_BAR = 0.10, 1.5
SAMPLE = str(Lm.demo.data)


class Shape(NamedTuple):
    """A Llama, and how it is trained to measure its memory."""

    hidden: int
    layers: int
    heads: int
    shared: int
    inner: int
    words: int
    options: tuple[str, ...] = ()


class Spent(NamedTuple):
    """``cpu`` is the processor time, which other programs disturb less."""

    seconds: float
    cpu: float


SHAPES = {
    "10m": Shape(256, 4, 8, 2, 768, 32000, ("--dtype=fp32", "--batch-size=8")),
    "60m": Shape(512, 8, 8, 2, 1536, 49152, ("--dtype=bf16", "--batch-size=8")),
    "135m": Shape(576, 30, 9, 3, 1536, 49152, ("--dtype=bf16", "--batch-size=4", "--lora")),
    "300m": Shape(
        1024, 24, 16, 4, 2816, 32000, ("--dtype=bf16", "--batch-size=2", "--gradient-checkpointing")
    ),
    "1b": Shape(2048, 16, 32, 8, 8192, 32000, ("--dtype=bf16", "--batch-size=1", "--lora")),
}


def main() -> None:
    """Run one of the two parts, or a side of the second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("memory", "speed"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--side", choices=("engine", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args)
    elif args.part == "memory":
        measure_memory(args.shapes.split(","))
    else:
        measure_speed(args)


def make_model(folder: Path, shape: Shape, dtype: str) -> float:
    """Write a random model and a tokenizer; return its parameters, in millions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jobs.worker.data.readers import read_table
    from jobs.worker.training.model import new_tokenizer, train_tokenizer

    tokenizer = new_tokenizer(train_tokenizer([row["text"] for row in read_table(SAMPLE).rows]))
    tokenizer.eos_token = tokenizer.sep_token
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=shape.words,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(round(model.num_parameters() / 1e6, 1))


def _preloaded(threads: int) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **preload(), **own, "PYTHONPATH": f"{ROOT}:{ROOT / 'jobs'}"}


def measure_memory(names: list[str]) -> None:
    """Train each shape; compare its peak with the prediction."""
    figures, missed = {}, []
    for name in names:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as root:
            # In another process: this one stays small.
            code = "import sys; from pathlib import Path; from benchmarks.lm import *; "
            code += "print(make_model(Path(sys.argv[1]), SHAPES[sys.argv[2]], sys.argv[3]))"
            # As in most files; fp32 where it is trained.
            dtype = "bfloat16" if "--lora" in shape.options else "float32"
            model = f"{root}/model"
            argv = [sys.executable, "-c", code, model, name, dtype]
            made = subprocess.run(
                argv, cwd=ROOT, env=_preloaded(1), check=True, capture_output=True, text=True
            )
            data = Path(root, "data.txt")
            data.write_text("\n\n".join([Path(SAMPLE).read_text()] * 20))
            argv = [sys.executable, "-m", "worker.tasks", "lm", f"--data={data}"]
            argv += [f"--model={model}", f"--output={root}/output", "--max-length=256"]
            argv += [f"--eval={SAMPLE}", "--token-cache=none", "--max-steps=2", "--compile=off"]
            argv += ["--checkpoint-every=2", *shape.options]
            predicted, peak = _train(argv)
            (state,) = Path(root, "output.state", "checkpoints").glob("*/state.pt")
            figures[name] = {
                "parameters_m": float(made.stdout.split()[-1]),
                "options": " ".join(shape.options),
                "predicted_gb": predicted,
                "peak_gb": round(peak, 2),
                "checkpoint_mb": round(state.stat().st_size / 1e6, 1),
            }
        print(name, figures[name], flush=True)
        if abs(peak / predicted - 1) > MEMORY_BAR:
            missed.append(f"{name}: a peak within {MEMORY_BAR:.0%} of the prediction")
    finish(missed, benchmark="lm memory", limit=MEMORY_BAR, shapes=figures)


def _train(argv: list[str]) -> tuple[float, float]:
    """Return the predicted and the actual peak, in GB."""
    with subprocess.Popen(argv, env=_preloaded(1), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        said = running.stdout.read()
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    found = re.search(r"needs about ([\d.]+) GB of memory per rank", said)
    if running.returncode or found is None:
        raise SystemExit(f"the run failed: {said[-2000:]}")
    return float(found[1]), usage.ru_maxrss * 1024 / 1e9


def measure_speed(args: argparse.Namespace) -> None:
    """Let both sides train in turn; print the ratio of their speeds."""
    rounds: dict[str, list[Spent]] = {"trainer": [], "engine": []}
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parameters = make_model(model, SHAPES[args.shape], "bfloat16")
        sides = {}
        for side in rounds:
            argv = [sys.executable, "-m", "benchmarks.lm", *sys.argv[1:]]
            argv += [f"--side={side}", f"--model={model}"]
            sides[side] = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=_preloaded(args.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(sides[side].kill)
        for number in range(-1, args.rounds):  # the first one prepares
            for side, process in sides.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{number}\n")
                process.stdin.flush()
                lines = iter(process.stdout.readline, "")
                found = next((line for line in lines if line.startswith("took")), None)
                if found is None:
                    raise SystemExit(f"{side} failed")
                took = Spent(*(round(float(each), 3) for each in found.split()[1:]))
                print(number, side, took, flush=True)
                rounds[side] += [took] if number >= 0 else []
    pairs = list(zip(rounds["trainer"], rounds["engine"], strict=True))
    ratios = [one.seconds / other.seconds for one, other in pairs]
    ratio = statistics.median(ratios)
    finish(
        [] if ratio >= SPEED_BAR else [f"{SPEED_BAR} times as fast as peft with Trainer"],
        benchmark="lm speed",
        ratio=round(ratio, 2),
        ratios=[round(each, 2) for each in ratios],
        cpu_ratio=round(statistics.median(one.cpu / other.cpu for one, other in pairs), 2),
        rounds=rounds,
        parameters_m=parameters,
        length=args.length,
        batch_size=args.batch_size,
        steps=args.steps,
        threads=args.threads,
        compile=args.compile,
    )


def spent() -> Spent:
    """Return the time until now."""
    return Spent(time.perf_counter(), time.process_time())


def since(begin: Spent, end: Spent) -> Spent:
    """Return the time between two."""
    return Spent(end.seconds - begin.seconds, end.cpu - begin.cpu)


def serve(args: argparse.Namespace) -> None:
    """Train for a few steps for each line of standard input, and print the seconds."""
    import torch

    play = {"engine": engine, "trainer": trainer}[args.side](args)
    for line in sys.stdin:
        torch.manual_seed(int(line) + 1)
        shape = (args.steps * args.batch_size, args.length)
        rows = torch.randint(5, SHAPES[args.shape].words, shape)
        print("took", *play(rows), flush=True)


def engine(args: argparse.Namespace) -> Any:
    """Return a function that trains on rows with the product."""
    import io

    import numpy as np

    from jobs.worker.data.tokens import Tokens
    from jobs.worker.runtime.context import RankContext
    from jobs.worker.runtime.events import Events
    from jobs.worker.runtime.precision import Precision
    from jobs.worker.runtime.ranks import join
    from jobs.worker.tasks.lm.task import Packed
    from jobs.worker.training.batches import TrainingRun
    from jobs.worker.training.optimizer_step import prepare, take_step
    from jobs.worker.training.task import Data

    options = LmOptions(
        model=args.model,
        lora=True,
        max_length=args.length,
        batch_size=args.batch_size,
        compile=args.compile,
        dtype="bf16",
    )
    ranks = join("gloo", {}).__enter__()
    task = Lm(options)
    context = RankContext(options, ranks, Events(0, io.StringIO()), Precision("bf16", ""))
    loaded = task.load(context, Data([], "", [], ""))
    prepared: list[Any] = []

    def play(rows: Any) -> Spent:
        ids = rows.flatten().numpy().astype(np.int32)
        samples = Packed(Tokens(ids[:-1], np.array([0, len(ids) - 1])), int(ids[-1]), args.length)
        run = TrainingRun(context, task, loaded, samples)
        prepared[:] = prepared or prepare(run, 1000)
        batches = np.arange(len(samples)).reshape(-1, args.batch_size)
        model, optimizer = prepared
        begin = spent()
        for chosen in batches:
            take_step(run, model, optimizer, run.batch(chosen))
        return since(begin, spent())

    return play


def trainer(args: argparse.Namespace) -> Any:
    """Return a function that trains on rows with peft and Trainer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        begin = end = Spent(0.0, 0.0)

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = Spent(0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = self.begin if self.begin.seconds else spent()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.end = spent()

    base = AutoModelForCausalLM.from_pretrained(args.model)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    clock = Clock()
    settings = TrainingArguments(
        output_dir=f"{args.model}/trainer",
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=1,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = get_peft_model(base, config)
    play_with = Trainer(model=model, args=settings, train_dataset=[], callbacks=[clock])

    def play(rows: Any) -> Spent:
        play_with.train_dataset = [{"input_ids": row, "labels": row} for row in rows]
        play_with.train()
        return since(clock.begin, clock.end)

    return play


if __name__ == "__main__":
    main()
