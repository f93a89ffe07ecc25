"""A trained model for OpenVINO, in int8 if that keeps a promise, measured beside the original.

It is in ``openvino/`` of the model's folder, where optimum-intel and sentence-transformers look for it.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.tokens import Longs
from ..runtime.errors import TrainingError, first_line
from ..runtime.pinning import across
from .batches import TrainingRun, pad_inputs
from .best import Unseen, evaluate_quietly
from .card import Z
from .evaluation import plan_batches
from .options import EXPORTED, EncoderOptions
from .task import Loaded, pick_scores

INT8, PARTLY = "int8", "int8 except the first and last layer"
CALIBRATED = 300
"""Training samples from which the ranges of activations are known."""
MEASURED, SINGLE = 512, 64
"""Evaluation samples whose speed is measured in batches, and one by one."""

Inputs = dict[str, torch.Tensor]


class Speed(NamedTuple):
    """Rows per second in batches, and percentiles of the milliseconds of a single row, on one rank."""

    rows_per_second: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Form:
    """A form of the model. ``loss`` is that of the score against the original, in points.

    If the score is a share of records, the loss is at most ``loss_at_most`` with a probability of 97.5 %. The
    uncertainty of other scores is unknown, and both are equal.
    """

    form: str
    score: float
    loss: float
    loss_at_most: float
    speed: Speed

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``results.json``."""
        losses = {name: round(getattr(self, name), 3) for name in ("loss", "loss_at_most")}
        return {"form": self.form, "score": self.score, **losses, **self.speed._asdict()}


class Compiled(torch.nn.Module):
    """Stands in for a transformers model, and computes with OpenVINO. All else is the model's.

    ``cpus`` are those of the rank, if its main thread may be bound to one.
    """

    def __init__(self, model: Any, names: Sequence[str], graph: Any, cpus: str = "") -> None:
        super().__init__()
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1}
        with across(cpus):
            compiled = _openvino().Core().compile_model(graph, "CPU", settings)
        is_bf16 = compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "bf16"
        self.dtype_used = "bf16" if is_bf16 else "fp32"
        """In what OpenVINO computes here, except layers in int8."""
        self._request, self._names = compiled.create_infer_request(), names
        self._model = [model]  # in a list, it is no part of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._model[0], name)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Return the model's output, whose tensors are float32."""
        from transformers.utils import ModelOutput  # noqa: PLC0415 - reads variables when imported

        found = self._request.infer({name: each.numpy() for name, each in inputs.items()})
        tensors = [torch.from_numpy(found[place].copy()) for place in range(len(self._names))]
        return ModelOutput(dict(zip(self._names, tensors, strict=True)))


def export_model(run: TrainingRun, unseen: Unseen, figures: dict[str, Any]) -> dict[str, Any]:
    """Write the first form that keeps the promise of ``--max-loss``, from ``--export`` on.

    ``figures`` are those of the trained model, with its predictions. Returns all forms that were tried, with
    their speeds and scores, for ``results.json``. The last one, in bf16 if the processor has it, is written
    in any case, with a warning. All ranks call it together.
    """
    context, options = run.context, _options(run)
    ranks, note, model = context.ranks, context.events.note, run.loaded.model
    batches = list(_inputs(run, unseen.samples, MEASURED))
    single = list(_inputs(run, unseen.samples, SINGLE, together=1))
    with torch.inference_mode(), context.autocast():
        speed = _measure(_inner(model), batches, single)
    metric, score = ranks.share(_pick_score(run, figures) if ranks.first else None)
    forms = [Form(f"PyTorch, {context.precision.dtype}", score, 0.0, 0.0, speed)]
    for name, names, graph in _convert(run):
        compiled = Compiled(_inner(model), names, graph, _cpus(run))
        after = evaluate_quietly(run, run.loaded._replace(model=_replace(model, compiled)), unseen)
        speed = _measure(compiled, batches, single)
        if ranks.first:
            now = pick_scores(after.figures)[metric]
            lost = now - score if options.metrics.get(metric) == "min" else score - now
            is_share = metric in run.task.shares
            known, found = (each.get("predictions") for each in (figures, after.figures))
            doubt = _uncertainty(known, found, lost) if is_share else 0.0
            name = name or f"OpenVINO, {compiled.dtype_used}"
            most = min(lost + doubt, score) if is_share else lost
            forms.append(Form(name, now, lost, most, speed))
        forms = ranks.share(forms)
        note(_describe(forms[-1], forms[0], metric))
        if forms[-1].loss_at_most <= options.max_loss:
            break
    if ranks.first:
        target = context.output / "model" / EXPORTED
        target.parent.mkdir(exist_ok=True)
        _openvino().save_model(graph, target, compress_to_fp16=False)
    if forms[-1].loss_at_most > options.max_loss:
        note(
            f"warning: no form keeps --max-loss {options.max_loss:g} with certainty; {EXPORTED} has "
            f"{forms[-1].form}. More evaluation data give narrower intervals"
        )
    return {"metric": metric, "max_loss": options.max_loss, "forms": [e.as_dict() for e in forms]}


def require_packages() -> None:
    """Raise :class:`TrainingError` if a package is missing: not after hours of training."""
    if missing := [name for name in ("openvino", "nncf") if find_spec(name) is None]:
        raise TrainingError(
            f"--export needs the package {missing[0]}",
            hint="add openvino and nncf to the packages of your stack or image",
        )


def _options(run: TrainingRun) -> EncoderOptions:
    options = run.context.options
    assert isinstance(options, EncoderOptions)
    return options


def _cpus(run: TrainingRun) -> str:
    """Return this rank's CPUs, as it found them before it computed; "" if they are unknown."""
    context = run.context
    found = context.hardware[context.ranks.rank].facts.found if context.hardware else None
    return (found.cpus if found else None) or ""


def _pick_score(run: TrainingRun, figures: dict[str, Any]) -> tuple[str, float]:
    """Return ``--metric``, or else a share of records if there is one, because its interval is known."""
    scores, wanted = pick_scores(figures), run.context.options.metric
    names = [wanted] if wanted else (*run.task.shares, *run.context.options.metrics, *scores)
    name = next(each for each in names if each in scores)
    return name, scores[name]


def use_exported(folder: Path, loaded: Loaded) -> Loaded:
    """Return a trained model that computes with the form in its folder."""
    openvino, model = _openvino(), _inner(loaded.model)
    graph = openvino.Core().read_model(folder / EXPORTED)
    names = [each.get_any_name() for each in graph.outputs]
    return loaded._replace(model=_replace(loaded.model, Compiled(model, names, graph)))


def _openvino() -> Any:
    # Both packages would send data about their use to a third party.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    # oneTBB would load hwloc with another malloc than that of LD_PRELOAD, and the process would abort.
    os.environ.setdefault("TBB_ENABLE_SANITIZERS", "1")
    import openvino  # noqa: PLC0415 - an optional package

    return openvino


def _inner(model: Any) -> Any:
    """Return transformers' model: that of `train embed` is inside another."""
    return model.encoder if hasattr(model, "encode") else model


def _replace(model: Any, compiled: Compiled) -> Any:
    if not hasattr(model, "encode"):
        return compiled
    twin = copy.copy(model)
    twin._modules = {**model._modules, "encoder": compiled}
    return twin


def _inputs(
    run: TrainingRun, samples: Any, count: int, together: int | None = None
) -> Iterator[Inputs]:
    """Yield the inputs of random samples in batches of similar length, or of ``together``."""
    parts = getattr(samples, "parts", samples)  # groups are several texts
    rng = np.random.default_rng(run.context.options.seed)
    chosen: Longs = rng.permutation(len(parts))[:count]
    batches = plan_batches(parts.lengths[chosen], fewest=1)
    if together:
        batches = np.split(np.arange(len(chosen)), range(together, len(chosen), together))
    for batch in batches:
        rows = [parts[int(each)] for each in chosen[batch]]
        yield pad_inputs(rows, run.loaded.pad_token)


def _convert(run: TrainingRun) -> Iterator[tuple[str, list[str], Any]]:
    """Yield the forms to try: their names, those of their outputs, and OpenVINO's graphs.

    The last one has no name: the processor decides in what it computes.
    """
    samples = list(_inputs(run, run.samples, CALIBRATED))
    model, (names, graph) = _inner(run.loaded.model), _trace(run, samples[0])
    if _options(run).export == INT8:
        for name, omitted in ((INT8, ()), (PARTLY, _outer_layers(model))):
            with across(_cpus(run)):
                quantized = _quantize(graph, samples, omitted)
            yield name, names, quantized
    yield "", names, graph


def require_convertible(run: TrainingRun) -> None:
    """Raise :class:`TrainingError` if OpenVINO can't convert the model: not after hours of training."""
    run.loaded.model.eval()  # training changes it back
    _trace(run, next(_inputs(run, run.samples, 1)))


def _trace(run: TrainingRun, inputs: Inputs) -> tuple[list[str], Any]:
    """Return OpenVINO's graph of the model, and the names of its outputs."""
    model, openvino = _inner(run.loaded.model), _openvino()
    with torch.inference_mode(), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing
        names = list(model(**inputs).keys())
        try:
            graph = openvino.convert_model(model, example_input=inputs)
            for port, name in zip(graph.outputs, names, strict=True):
                port.get_tensor().set_names({name})
            for name in inputs:
                graph.input(name)
        except Exception as error:  # of the library's many types
            kind, why = type(model).__name__, _reason(error)
            raise TrainingError(
                f"--export: OpenVINO can't convert {kind}: {why}", hint="omit --export"
            ) from error
    return names, graph


def _reason(error: Exception) -> str:
    """Return why OpenVINO failed: the first line that does not name its own code."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and "src/" not in line), first_line(error)).rstrip(
        ":"
    )


def _outer_layers(model: Any) -> tuple[str, ...]:
    """Return patterns of the names that OpenVINO gives to parts of the first and last layer."""
    lists = [
        (name, len(each))
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.ModuleList)
    ]
    name, count = max(lists, key=lambda each: each[1], default=("", 0))
    return tuple(rf".*{re.escape(name)}\.{place}[./].*" for place in (0, count - 1))


def _quantize(graph: Any, samples: Sequence[Inputs], omitted: Sequence[str]) -> Any:
    import nncf  # noqa: PLC0415 - an optional package

    nncf.set_log_level(logging.ERROR)
    arrays = [{name: each.numpy() for name, each in batch.items()} for batch in samples]
    with redirect_stdout(io.StringIO()):  # progress bars
        return nncf.quantize(
            graph,
            nncf.Dataset(arrays),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(arrays),
            ignored_scope=nncf.IgnoredScope(patterns=list(omitted), validate=False),
        )


def _measure(
    model: Callable[..., Any], batches: Sequence[Inputs], single: Sequence[Inputs]
) -> Speed:
    def run(inputs: Inputs) -> float:
        begin = time.perf_counter()
        model(**inputs)
        return time.perf_counter() - begin

    for inputs in (*batches, *single[:2]):
        run(inputs)  # prepares kernels
    seconds = min(sum(map(run, batches)) for _ in range(3))
    rows = sum(len(each["input_ids"]) for each in batches)
    each = 1000 * np.array([run(inputs) for inputs in single for _ in range(3)])
    low, high = np.percentile(each, (50, 99))
    return Speed(round(rows / seconds, 1), round(float(low), 2), round(float(high), 2))


def _uncertainty(before: Any, after: Any, loss: float) -> float:
    """Return half the paired interval of 95 % of a share's loss, in points, given both predictions.

    A record with the same prediction has the same score; that of another changes by at most 100 points.
    """
    known, found = (
        [*each.values()] if isinstance(each, dict) else each for each in (before, after)
    )
    count = len(known)
    share = sum(one != other for one, other in zip(known, found, strict=True)) / count
    return Z * 100 * math.sqrt(max(share - (loss / 100) ** 2, 1 / count) / count)


def _describe(form: Form, original: Form, metric: str) -> str:
    gain = form.speed.rows_per_second / original.speed.rows_per_second
    certain = f", with 97.5 % certainty at most {form.loss_at_most:.2f}"
    return (
        f"export, {form.form}: {gain:.2f} times the rows per second ({form.speed.rows_per_second:,.0f}), "
        f"{metric} {form.score:.2f}, a loss of {form.loss:.2f}"
        f"{certain if form.loss_at_most != form.loss else ''}"
    )
