"""Baseline: run_qa.py of transformers, or Trainer with its settings if there is no script.

python -m benchmarks.baseline --model FOLDER --output DIR [--run-qa PATH] [--epochs 2]

Nothing of run_qa.py is in this repository. What it does that decides its speed: each feature is padded
to 384 tokens, batches are random, dropout is the model's own, the rate falls linearly from the first
step on, gradients are clipped at 1.0, and the optimizer is Trainer's own default.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import finish
from benchmarks.squad_data import (
    MAX_LENGTH,
    STRIDE,
    add_arguments,
    find_encoder,
    load_features,
    load_tokenizer,
)
from jobs.worker.tasks.squad.dataset import Question, read_dataset
from jobs.worker.tasks.squad.features import Feature

TRAINER = "transformers.Trainer with run_qa.py's settings"


class Settings(NamedTuple):
    """Settings of the baseline.

    ``grouped``: padding off and length grouping on. Without ``padded``, its random batches are padded to
    their own longest feature only: the same arithmetic but for positions that are masked. ``strong`` adds
    what else Trainer offers: grouped lengths padded to multiples of 8, and the fused optimizer.
    """

    batch_size: int
    dtype: str = "fp32"
    grouped: bool = False
    epochs: float = 1
    learning_rate: float = 3e-5
    seed: int = 42
    padded: bool = True
    strong: bool = False


def arguments(settings: Settings, output: str) -> Any:
    """Return Trainer's arguments, under this release's names."""
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    values: dict[str, Any] = {
        "output_dir": output,
        "per_device_train_batch_size": settings.batch_size,
        "num_train_epochs": settings.epochs,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "bf16": settings.dtype == "bf16",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "label_names": ["start_positions", "end_positions"],
    }
    if settings.strong:
        values["optim"] = "adamw_torch_fused"
    if settings.grouped:
        values |= (
            {"train_sampling_strategy": "group_by_length"}
            if "train_sampling_strategy" in known
            else {"group_by_length": True}
        )
    return TrainingArguments(**values)


def rows(features: Sequence[Feature], tokenizer: Any, *, padded: bool) -> list[dict[str, Any]]:
    """Return features in the form of run_qa.py's data set."""
    made = []
    for feature in features:
        missing = MAX_LENGTH - len(feature) if padded else 0
        row = {name: [*values.tolist(), *[0] * missing] for name, values in feature.inputs.items()}
        if missing:
            row["input_ids"][len(feature) :] = [tokenizer.pad_token_id] * missing
        row["attention_mask"] = [1] * len(feature) + [0] * missing
        made.append(row | {"start_positions": feature.start, "end_positions": feature.end})
    return made


class Baseline:
    """Trainer with run_qa.py's settings, which can train several times on different features.

    Trainer groups lengths among a quarter of its batches, at most 50 of them, and puts the longest one
    first. Of a round's few batches it would group none, so ``sorted_batches`` gives it those of a long run.
    """

    def __init__(
        self, model: Any, tokenizer: Any, settings: Settings, *, sorted_batches: bool = False
    ) -> None:
        from torch.utils.data import SequentialSampler
        from transformers import DataCollatorWithPadding, Trainer, default_data_collator

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(self.train_dataset)

        self.settings, self.tokenizer = settings, tokenizer
        self._clock = _clock()
        self._folder = tempfile.TemporaryDirectory()
        self._padded = settings.padded and not settings.grouped
        multiple = 8 if settings.strong else None
        grouped = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
        collator = default_data_collator if self._padded else grouped
        self._sorted = sorted_batches
        self.trainer = (InOrder if sorted_batches else Trainer)(
            model=model,
            args=arguments(settings, self._folder.name),
            data_collator=collator,
            train_dataset=[],
            callbacks=[self._clock],
        )

    def train(self, features: Sequence[Feature]) -> float:
        """One training on these features; the seconds from its first step to its last."""
        if self._sorted:
            size = self.settings.batch_size
            by_length = sorted(features, key=len)
            batches = [by_length[first : first + size] for first in range(0, len(by_length), size)]
            random.Random(self.settings.seed).shuffle(batches)
            features = list(chain.from_iterable(batches))
        self.trainer.train_dataset = rows(features, self.tokenizer, padded=self._padded)
        self.trainer.train()
        seconds: float = self._clock.end - self._clock.begin
        return seconds


def _clock() -> Any:
    """Return a Trainer callback that records when the first step began and the last one ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        begin = end = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = self.begin or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.end = time.perf_counter()

    return Clock()


def flatten(questions: Sequence[Question]) -> str:
    """Return questions in the flat layout of run_qa.py; SQuAD's is nested."""
    flat = [
        {
            "id": question.id,
            "context": question.context,
            "question": question.text,
            "answers": {
                "text": [answer.text for answer in question.answers],
                "answer_start": [answer.start for answer in question.answers],
            },
        }
        for question in questions
    ]
    return json.dumps({"data": flat})


def drive_run_qa(
    script: Path, model: str, questions: Sequence[Question], settings: Settings, output: Path
) -> dict[str, Any]:
    """Train with the original script; return its ``train_results.json``."""
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    output.mkdir(parents=True, exist_ok=True)
    flat = output / "train.json"
    flat.write_text(flatten(questions))
    argv = [
        *(sys.executable, str(script), "--do_train"),
        *("--model_name_or_path", model, "--train_file", str(flat)),
        *("--output_dir", str(output), "--max_seq_length", str(MAX_LENGTH)),
        *("--doc_stride", str(STRIDE), "--learning_rate", str(settings.learning_rate)),
        *("--per_device_train_batch_size", str(settings.batch_size)),
        *("--num_train_epochs", str(settings.epochs), "--seed", str(settings.seed)),
        *("--save_strategy", "no", "--report_to", "none"),
        "--use_cpu" if "use_cpu" in known else "--no_cuda",
    ]
    argv += ["--overwrite_output_dir"] if "overwrite_output_dir" in known else []
    argv += ["--bf16"] if settings.dtype == "bf16" else []
    if settings.grouped:
        argv += ["--pad_to_max_length", "False"]
        new = "train_sampling_strategy" in known
        argv += ["--train_sampling_strategy", "group_by_length"] if new else ["--group_by_length"]
    subprocess.run(argv, stdout=sys.stderr, check=True)
    results: dict[str, Any] = json.loads((output / "train_results.json").read_text())
    return results


def train(
    model: str, data: Path, settings: Settings, output: Path, run_qa: Path | None = None
) -> dict[str, Any]:
    """Train a pretrained model, and save it with its tokenizer in ``output``.

    Returns ``by`` (what trained it), ``features`` (0 where unknown) and ``seconds``.
    """
    if run_qa is not None:
        results = drive_run_qa(run_qa, model, read_dataset(data), settings, output)
        count = int(results.get("train_samples", 0))
        return {"by": str(run_qa), "features": count, "seconds": results["train_runtime"]}
    import torch
    from transformers import AutoModelForQuestionAnswering

    torch.manual_seed(settings.seed)  # the new head's weights
    tokenizer = load_tokenizer(Path(model))
    features = load_features(data, tokenizer)
    loaded = AutoModelForQuestionAnswering.from_pretrained(model)
    baseline = Baseline(loaded, tokenizer, settings)
    seconds = baseline.train(features)
    loaded.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return {"by": TRAINER, "features": len(features), "seconds": round(seconds, 3)}


def main() -> None:
    """Train once; print the method, the number of features, and the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--run-qa", type=Path, help="transformers' own script")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--grouped", action="store_true", help="no padding, length grouping")
    args = parser.parse_args()
    settings = Settings(
        args.batch_size, args.dtype, args.grouped, args.epochs, args.learning_rate, args.seed
    )
    model = str(find_encoder(args.encoder))
    figures = train(model, args.data, settings, args.output, args.run_qa)
    finish([], benchmark="baseline", **figures, **settings._asdict())


if __name__ == "__main__":
    main()
