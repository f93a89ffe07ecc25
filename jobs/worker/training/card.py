"""The model card: README.md in the model's folder, which the hub and huggingface_hub read.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from ..runtime.events import name_files
from .options import BASE_MODEL, HUB, SCRATCH, flag
from .state import TrainContext
from .task import Loaded, Task

Z, DRAWS = 1.96, 10_000
"""95 % of a normal distribution are within so many standard deviations; resampled confusion matrices."""
_PLACES = frozenset(
    {
        *("output", "model", "data", "eval", "token_cache", "backend", "resume"),
        *("checkpoint_every", "report_to", "push_to"),
    }
)
"""Options that are on the card in other words, or that have nothing to do with the model."""
_FOLDERS = re.compile(
    r"(?<![\w:/])[~.]{0,2}/\S*/|\S+/(?=[^\s/]+\.(?:csv|tsv|jsonl?|parquet|conll|txt)\b)"
)
_PIPELINE = """from transformers import pipeline

model = pipeline("{tag}", "{name}")
print(model({text}))"""
_CHAT = '[{"role": "user", "content": "How hot is it?"}]'
_PROMPT = f"""tokenizer.apply_chat_template(
    {_CHAT}, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
_LOAD = {
    "question-answering": """from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForQuestionAnswering.from_pretrained("{name}")
print(model(**tokenizer("Where is it?", "It is in Delft.", return_tensors="pt")))""",
    "text-ranking": """from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForSequenceClassification.from_pretrained("{name}")
print(model(**tokenizer("How hot is it?", "It has 5,772 kelvins.", return_tensors="pt")).logits)""",
    "sentence-similarity": """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
question = model.encode_query("How hot is it?")
print(model.similarity(question, model.encode_document("It has 5,772 kelvins.")))""",
    "peft": """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoPeftModelForCausalLM.from_pretrained("{name}")
inputs = {inputs}
print(tokenizer.decode(model.generate(**inputs, eos_token_id=tokenizer.eos_token_id)[0]))""",
    "": """from safetensors.torch import load_file

weights = load_file("{name}/model.safetensors")
print({{name: tuple(weight.shape) for name, weight in weights.items()}})""",
}
_LIBRARIES = {"sentence-similarity": "sentence-transformers", "peft": "peft", "": "pytorch"}
_CARD = """
# {title}

{origin} the task `{task}`.

## Scores

On {eval_records:,} records{eval_data}:

| score | value | 95 % interval |
|---|---|---|
{rows}

## Use

```python
{code}
```

## Training

{facts}
{exported}

## License

None is set: add `license` to the header. Those of the data and of the base model may limit the choice.
"""

_EXPORTED = """
## OpenVINO

`openvino/openvino_model.xml` is the last of these forms, measured on one rank. Layers that are not in int8
are stored in fp32; OpenVINO computes them in bf16 on processors with bf16, and in fp32 on others.

| form | {metric} | loss (97.5 % limit) | rows per second | p50 ms of a row | p99 ms |
|---|---|---|---|---|---|
{rows}

optimum-intel (`subfolder="openvino"`) and sentence-transformers (`backend="openvino"`) load it."""


def render_card(
    context: TrainContext, task: Task[Any], loaded: Loaded, figures: Mapping[str, Any], digest: str
) -> str:
    """Return the card of a trained model, with its figures as in ``results.json``.

    ``digest`` is that of the training samples.
    """
    from huggingface_hub import ModelCardData  # noqa: PLC0415 - reads variables when imported

    options = context.options
    base = os.environ.get(BASE_MODEL) or options.model_name or SCRATCH
    data = str(getattr(options, "data", None) or getattr(options, "dataset", ""))
    name = (options.push_to or "model").removeprefix(HUB)
    kind = "peft" if hasattr(loaded.model, "peft_config") else task.pipeline_tag
    template = getattr(loaded.tokenizer, "chat_template", None)
    is_chat = task.pipeline_tag == "text-generation" and template
    code = _LOAD.get(kind, _PIPELINE).format(
        tag=kind,
        name=name,
        text=_CHAT if is_chat else '"an excellent read"',
        inputs=_PROMPT if is_chat else 'tokenizer("It is", return_tensors="pt")',
    )
    header = ModelCardData(
        library_name=_LIBRARIES.get(kind, "transformers"),
        pipeline_tag=task.pipeline_tag or None,
        tags=["spr-cluster", task.name],
        metrics=[*figures["scores"]],
        base_model=base if _is_on_hub(base) else None,
        datasets=[data] if _is_on_hub(data) else None,
    )
    source = "" if base == SCRATCH else f" from {_name(base)}"
    trained_on = f"{figures['train_records']:,} records of {_without_folders(figures['data'])}"
    is_part = getattr(options, "eval_fraction", None)  # "0.1 of rows.csv"
    seen = figures["data"] == figures["eval_data"]
    body = _CARD.format_map(
        {
            **figures,
            "title": name.rpartition("/")[2]
            if options.push_to
            else f"A model of `train {task.name}`",
            "origin": f"Trained{source} on {trained_on}, for" if options.epochs else "For",
            "eval_data": " of the training data, which it has seen"
            if seen
            else (", " if is_part else " of ") + _without_folders(figures["eval_data"]),
            "rows": "\n".join(f"| {' | '.join(row)} |" for row in _scores(task, figures)),
            "code": code,
            "exported": _exported(figures.get("export") or {}),
            "facts": "\n".join(
                f"- **{fact}:** {text}" for fact, text in _facts(context, figures, digest)
            ),
        }
    )
    card = f"---\n{header.to_yaml()}\n---\n{body}"
    return card if options.epochs else _without_training(card, Path(str(options.model_name)))


def _without_training(card: str, model: Path) -> str:
    """Return the card of a model that a run only evaluated: its own if it has one, with the new figures."""
    new = _sections(card)
    own: dict[str, str] = {}
    with suppress(OSError, ValueError):
        own = _sections((model / "README.md").read_text(encoding="utf-8"))
    if "spr-cluster" not in own.get("", ""):  # its tag
        own = {}
    figures = {name: new.get(name, "") for name in ("Scores", "Use", "OpenVINO")}
    return "\n## ".join(filter(None, {**new, "Training": "", **own, **figures}.values()))


def _sections(card: str) -> dict[str, str]:
    """Return a card's sections by their titles, and what is before them by ""."""
    first, *others = card.split("\n## ")
    return {"": first, **{each.partition("\n")[0]: each for each in others}}


def _exported(export: Mapping[str, Any]) -> str:
    """Return the section about the model for OpenVINO, if there is one."""
    if not export:
        return ""
    rows = (
        f"| {each['form']} | {each['score']:.2f} | {each['loss']:.2f}{_limit(each)} | "
        f"{each['rows_per_second']:,.0f} | {each['p50_ms']:.1f} | {each['p99_ms']:.1f} |"
        for each in export["forms"]
    )
    return _EXPORTED.format(metric=export["metric"], rows="\n".join(rows))


def _limit(form: Mapping[str, Any]) -> str:
    """Return the upper limit of a loss, if it is known."""
    most = form["loss_at_most"]
    return f" ({most:.2f})" if most != form["loss"] else ""


def _is_on_hub(name: str) -> bool:
    """Return whether a card may name it: the hub accepts only its own names."""
    is_path = (
        name == os.environ.get(BASE_MODEL) or Path(name).expanduser().exists() or "://" in name
    )
    return bool(name) and name != SCRATCH and not is_path


def _name(text: str) -> str:
    """Return the user's name of data or a model, without folders: a card may become public."""
    return _without_folders(name_files(text))


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)


def _scores(task: Task[Any], figures: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    intervals = find_intervals(task, figures)
    for name, value in figures["scores"].items():
        interval = "{:.2f} to {:.2f}".format(*intervals[name]) if name in intervals else ""
        shown = format(value, task.plain_scores.get(name) or ".2f")
        yield task.scores.get(name, name), shown, interval


def find_intervals(task: Task[Any], figures: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the scores' 95 % intervals for other data of this kind, where the figures tell enough.

    Shares of records have Wilson's interval; macro F1 one from resampled confusion matrices. `embed` counts
    its anchors. If some have several positives, the interval is rather too wide.
    """
    found, count = {}, figures.get("anchors", figures["eval_records"])
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


def _facts(
    context: TrainContext, figures: Mapping[str, Any], digest: str
) -> Iterator[tuple[str, str]]:
    facts, options = context.facts(), context.options
    yield "Data", f"{figures['train_samples']:,} samples with the digest `{digest}`"
    defaults, given = asdict(type(options)()), asdict(options)
    changed = [name for name in given if given[name] != defaults[name] and name not in _PLACES]
    words = (
        f"`{flag(name)}`"
        if given[name] is True
        else f"`{flag(name)} {quote(_name(str(given[name])))}`"
        for name in changed
    )
    yield "Options", " ".join(words) or "the defaults"
    rate, tests = figures["learning_rate"], len(figures["evaluations"])
    chosen = f", the best of {tests} evaluations" if tests and options.keep == "best" else ""
    yield "Model", f"of step {figures['model_step']:,}{chosen}; peak learning rate {rate:.3g}"
    record, seconds = read_record(), facts["seconds"]["total"]
    kinds = {each.get("type") for each in record.get("nodes", ())} - {None}
    processor = re.findall(
        r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8")
    )
    machine = ", ".join([*sorted(kinds), *processor[:1]])
    size, hosts = facts["world_size"], len(set(context.hosts)) or 1
    dtype = figures.get("dtype", facts["dtype"])  # what was used instead of int8
    yield "Hardware", f"{size} rank{'s' * (size > 1)} on {hosts} × {machine}; {dtype}"
    # A trial of a study shares its node.
    is_whole = record.get("billed") and "worker.study" not in record.get("argv", ())
    usd = record.get("usd_per_hour") if is_whole else None
    usd = usd * record.get("node_share", 1) if usd else None
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
