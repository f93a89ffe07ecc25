"""The model card: README.md in the model's folder, which the hub and huggingface_hub read.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runtime.events import name_files
from .options import BASE_MODEL, HUB, SCRATCH, TrainOptions, flag
from .state import TrainContext
from .task import Loaded, Task

README = "README.md"
Z = 1.96
"""Of the normal distribution: 95 % are within so many standard deviations."""
DRAWS = 10_000
_PLACES = frozenset(
    {"output", "model", "data", "eval", "token_cache", "backend", "resume", "push_to"}
)
"""Options that are on the card in other words, or that have nothing to do with the model."""
_FOLDERS = re.compile(r"(?<![\w:/])[~.]{0,2}/\S*/")
_PIPELINE = """from transformers import pipeline

model = pipeline("{tag}", "{name}")
print(model("an excellent read"))"""
_LOAD = {
    "question-answering": """from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForQuestionAnswering.from_pretrained("{name}")
print(model(**tokenizer("Where is it?", "It is in Delft.", return_tensors="pt")))""",
    "sentence-similarity": """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
print(model.similarity(model.encode("How hot is it?"), model.encode("It has 5,772 kelvins.")))""",
    "peft": """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoPeftModelForCausalLM.from_pretrained("{name}")
print(tokenizer.decode(model.generate(**tokenizer("It is", return_tensors="pt"))[0]))""",
    "": """from safetensors.torch import load_file

weights = load_file("{name}/model.safetensors")
print({{name: tuple(weight.shape) for name, weight in weights.items()}})""",
}


class Trained(NamedTuple):
    """A trained model, with its figures as in ``results.json``, and a digest of its training samples."""

    task: Task[Any]
    loaded: Loaded
    figures: Mapping[str, Any]
    digest: str


def write_card(context: TrainContext, trained: Trained) -> None:
    """Write the card into the model's folder."""
    path = context.output / "model" / README
    path.write_text(render_card(context, trained), encoding="utf-8")


def render_card(context: TrainContext, trained: Trained) -> str:
    task, figures, options = trained.task, trained.figures, context.options
    header, base = _describe(trained, options), _base_model(options)
    name = (options.push_to or "model").removeprefix(HUB)
    title = f"A model of `spr-cluster train {task.name}`"
    tag = "peft" if header["library_name"] == "peft" else task.pipeline_tag
    code = _LOAD.get(tag, _PIPELINE).format(tag=tag, name=name)
    source = f"Trained from {base}" if base != SCRATCH else "Trained"
    rows = "\n".join(f"| {' | '.join(row)} |" for row in _scores(trained))
    facts = "\n".join(f"- **{title}:** {text}" for title, text in _facts(context, trained))
    is_seen = figures["data"] == figures["eval_data"]
    where = "the training data, which it has seen" if is_seen else _name(figures["eval_data"])
    body = f"""
# {name.rpartition("/")[2] if options.push_to else title}

{source} on {figures["train_records"]:,} records of {_name(figures["data"])}, for the task `{task.name}`.

## Scores

On {figures["eval_records"]:,} records of {where}:

| score | value | 95 % interval |
|---|---|---|
{rows}

## Use

```python
{code}
```

## Training

{facts}

## License

None is set: add `license` to the header. Those of the data and of the base model may limit the choice.
"""
    return f"---\n{_to_yaml(header)}\n---\n{body}"


def _to_yaml(header: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData  # noqa: PLC0415 - reads variables when imported

    return str(ModelCardData(**header).to_yaml())


def _describe(trained: Trained, options: TrainOptions) -> dict[str, Any]:
    """Return the header's fields."""
    task, figures, loaded = trained.task, trained.figures, trained.loaded
    base, tag = options.model_name or SCRATCH, task.pipeline_tag
    is_adapter = hasattr(loaded.model, "peft_config")
    library = "sentence-transformers" if tag == "sentence-similarity" else "transformers"
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else library if tag else "pytorch",
        "tags": ["spr-cluster", task.name],
        "metrics": [*figures["scores"]],
    }
    if tag:
        header["pipeline_tag"] = tag
    # The hub accepts only its own names.
    if base != SCRATCH and BASE_MODEL not in os.environ and not Path(base).expanduser().exists():
        header["base_model"] = base
        header["base_model_relation"] = "adapter" if is_adapter else "finetune"
    data = getattr(options, "data", None) or getattr(options, "dataset", None)
    if data and not Path(data).exists() and "://" not in data:
        header["datasets"] = [data]
    return header


def _base_model(options: TrainOptions) -> str:
    return _name(os.environ.get(BASE_MODEL) or options.model_name or SCRATCH)


def _name(text: str) -> str:
    """Return the user's name of data or a model, without folders: a card may become public."""
    return _FOLDERS.sub("", name_files(text))


def _scores(trained: Trained) -> Iterator[tuple[str, str, str]]:
    intervals = find_intervals(trained.task, trained.figures)
    for name, value in trained.figures["scores"].items():
        low, high = intervals.get(name, (math.nan, math.nan))
        interval = "" if math.isnan(low) else f"{low:.2f} to {high:.2f}"
        yield trained.task.scores.get(name, name), f"{value:.2f}", interval


def find_intervals(task: Task[Any], figures: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the scores' 95 % intervals for other data of this kind, where the figures tell enough.

    Shares of records have Wilson's interval; macro F1 one from resampled confusion matrices.
    """
    found, count = {}, figures["eval_records"]
    for name, value in figures["scores"].items():
        if name in task.shares:
            share, part = value / 100, Z * Z / count
            middle = (share + part / 2) / (1 + part)
            half = Z / (1 + part) * math.sqrt(share * (1 - share) / count + part / count / 4)
            found[name] = (100 * max(middle - half, 0), 100 * min(middle + half, 1))
    matrix = np.array(figures.get("confusion") or [])
    if "macro_f1" in figures["scores"] and matrix.size:
        rng, shares = np.random.default_rng(0), matrix.ravel() / matrix.sum()
        draws = [_macro_f1(rng.multinomial(matrix.sum(), shares)) for _ in range(DRAWS)]
        low, high = np.percentile(draws, (2.5, 97.5))
        found["macro_f1"] = (float(low), float(high))
    return found


def _macro_f1(cells: Any) -> float:
    """Return the mean F1 of the classes that a confusion matrix, as one row, has."""
    matrix = cells.reshape(math.isqrt(len(cells)), -1)
    total = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float(100 * (2 * matrix.diagonal()[total > 0] / total[total > 0]).mean())


def _facts(context: TrainContext, trained: Trained) -> Iterator[tuple[str, str]]:
    figures, facts, options = trained.figures, context.facts(), context.options
    yield "Data", f"{figures['train_samples']:,} samples with the digest `{trained.digest}`"
    defaults = asdict(type(options)())
    changed = {
        name: value
        for name, value in asdict(options).items()
        if value != defaults[name] and name not in _PLACES
    }
    words = [flag(n) if v is True else f"{flag(n)} {_name(str(v))}" for n, v in changed.items()]
    yield "Options", " ".join(f"`{word}`" for word in words) or "the defaults"
    rate, tests = figures["learning_rate"], len(figures["evaluations"])
    chosen = f", the best of {tests} evaluations" if tests and options.keep == "best" else ""
    yield "Model", f"of step {figures['model_step']:,}{chosen}; peak learning rate {rate:.3g}"
    record, seconds = read_record(), facts["seconds"]["total"]
    hosts = len(set(context.hosts)) or 1
    kinds = {each.get("type") for each in record.get("nodes", ())} - {None}
    machine, size = ", ".join([*sorted(kinds), *_processor()]), facts["world_size"]
    yield "Hardware", f"{size} rank{'s' * (size > 1)} on {hosts} × {machine}; {facts['dtype']}"
    usd = record.get("usd_per_hour") if record.get("billed") else None
    cost = f", about ${usd * hosts * seconds / 3600:.2f} at on-demand prices" if usd else ""
    yield "Time", f"{seconds / 60:.1f} minutes{cost}"
    yield "Versions", ", ".join(f"{name} {each}" for name, each in facts["versions"].items())


def read_record() -> dict[str, Any]:
    """Return the job's record, which clusters of `up` have; ranks start in its folder."""
    try:
        found: dict[str, Any] = json.loads(Path("job.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("model name")][:1]
