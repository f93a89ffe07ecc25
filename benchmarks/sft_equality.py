"""Losses of `train lm --lora` and of TRL's SFTTrainer with peft, on the same batches, in fp32.

pip install --no-deps --target DIR trl && PYTHONPATH=DIR python -m benchmarks.sft_equality

Both sides get the same rows: prompts with completions, and chats whose template marks the assistant's words.
TRL makes its samples and labels of them itself. The models have random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import join
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.lm.task import Lm
from jobs.worker.training.batches import Schedule, TrainingRun, batches
from jobs.worker.training.optimizer_step import prepare, take_step
from jobs.worker.training.options import NO_CACHE
from tests.jobs.worker.tasks.chat_models import MARKED, new_chat_tokenizer, save_chat_model

BAR, BATCH = 1e-4, 4
SHAPES: dict[str, dict[str, int]] = {
    "10M": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 10,
    },
    "38M": {
        "vocab_size": 16_384,
        "hidden_size": 448,
        "intermediate_size": 1280,
        "num_hidden_layers": 14,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
    },
    # SmolLM2-135M's.
    "135M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


def make_chats(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Return different chats of a question and its answer: a sum."""
    found = dict[str, str]()
    while len(found) < count:
        one, two = draw.randrange(1000), draw.randrange(1000)
        found[f"What is {one} plus {two}?"] = f"{one + two}"
    turns = ([("user", one), ("assistant", two)] for one, two in found.items())
    return [{"messages": [{"role": r, "content": t} for r, t in each]} for each in turns]


def as_pairs(chats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chats' first turns as prompts and completions."""
    turns = [row["messages"] for row in chats]
    return [{"prompt": one["content"], "completion": f" {two['content']}"} for one, two in turns]


def losses_of_trl(run: TrainingRun, rows: list[dict[str, Any]], steps: int) -> list[float]:
    """Return the losses of SFTTrainer, which gets the rows in this order."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl: Any = import_module("trl")
    options: Any = run.task.options
    base = AutoModelForCausalLM.from_pretrained(options.model)
    adapters = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = get_peft_model(base, adapters)
    model.load_state_dict(run.loaded.model.state_dict())
    tokenizer, found = AutoTokenizer.from_pretrained(options.model), list[float]()
    tokenizer.pad_token = tokenizer.eos_token

    class Recording(trl.SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(rows)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            found.append(float(loss))
            return loss

    Recording(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=trl.SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=options.learning_rate,
            max_length=options.max_length,
            assistant_only_loss="messages" in rows[0],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    ).train()
    return found


def compare(folder: Path, rows: list[dict[str, Any]], steps: int, rate: float) -> dict[str, Any]:
    """Return the first and last loss, and the largest differences: of all steps, and of the first ten."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = LmOptions(
        model=str(folder),
        data=str(data),
        token_cache=NO_CACHE,
        lora=True,
        batch_size=BATCH,
        learning_rate=rate,
        warmup_ratio=0.0,
        max_length=64,
        compile="off",
    )
    own, schedule = list[float](), Schedule(len(rows) // BATCH, steps, 0)
    with join("gloo", {}) as ranks:
        context = RankContext(options, ranks, Events(rank=1), Precision("fp32", ""))
        task = Lm(options)
        known = task.read(lambda _: None)
        loaded = task.load(context, known)
        run = TrainingRun(context, task, loaded, task.prepare(context, loaded, known.train))
        order = list(batches(context, run.lengths, schedule))
        theirs = losses_of_trl(run, [rows[int(n)] for each in order for n in each], steps)
        model, optimizer = prepare(run, steps)
        for number, chosen in enumerate(order):
            optimizer.param_groups[0]["lr"] = rate * schedule.rate(number)
            own.append(take_step(run, model, optimizer, run.batch(chosen)).loss)
    assert len(own) == len(theirs) == steps
    apart = [abs(one - other) for one, other in zip(own, theirs, strict=True)]
    ends = {"first": round(own[0], 4), "last": round(own[-1], 4)}
    return {**ends, "largest_difference": max(apart), "in_ten_steps": max(apart[:10])}


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append")
    args = parser.parse_args()
    chats = make_chats(200, random.Random(1))
    found: dict[str, Any] = {}
    for name in args.shape or SHAPES:
        for kind, rows in (("pairs", as_pairs(chats)), ("chats", chats)):
            with tempfile.TemporaryDirectory() as root:
                tokenizer = new_chat_tokenizer([json.dumps(row) for row in rows], MARKED)
                folder = save_chat_model(Path(root), tokenizer, **SHAPES[name])
                found[f"{name} {kind}"] = compare(folder, rows, args.steps, args.learning_rate)
            print(name, kind, found[f"{name} {kind}"], flush=True)
    finish([name for name, each in found.items() if each["largest_difference"] > BAR], runs=found)


if __name__ == "__main__":
    main()
