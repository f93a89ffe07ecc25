"""One optimizer step on all ranks, and the preparation for all steps."""

from __future__ import annotations

import importlib
import math
import re
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from ..fast.communication import Replica
from ..fast.compilation import (
    COMPILED,
    FAST,
    choose_compilation,
    estimate_tflop,
    keep_compiled,
    why_no_compiler,
)
from ..fast.dropout import same_modes
from ..fast.embedding import train_used_words
from ..fast.first_batches import FastLayers
from ..fast.first_token import skip_other_tokens
from ..fast.int8 import LEAST_SIZE
from ..fast.optimizer import MasterAdamW, group_parameters, halve_weights
from ..fast.parts import INT8_PRODUCTS, find_parts
from ..runtime.errors import WorkerError, first_line
from .batches import StepBatch, TrainingRun
from .options import TextOptions, TrainOptions

FEWEST_TOKENS = 4
"""Of a sample that tells which tokens the loss depends on."""
_EXPERT = re.compile(r"experts\.\w*\d\.")
"""In the name of a parameter that only some tokens reach; experts in one tensor have no such names."""
IPEX_MODULE = "intel_extension_for_pytorch"


class Step(NamedTuple):
    """A finished step: this rank's ``loss``, the mean of which is that of all, and its seconds by activity.

    ``forward``, ``backward``, ``communication`` (only the wait after the backward pass, during which most
    of it runs), and ``optimizer`` (with clipping).
    """

    loss: float
    seconds: dict[str, float]


class StepTimer:
    """Measures a step's activities, one after the other."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds = dict.fromkeys(("forward", "backward", "communication", "optimizer"), 0.0)

    def lap(self, name: str, until: float | None = None) -> None:
        """Add the time since the last lap, up to now or to ``until``, to an activity."""
        now = time.perf_counter() if until is None else until
        self.seconds[name] += now - self._last
        self._last = now


def load_ipex() -> Any:
    """Return Intel Extension for PyTorch. Raises :class:`WorkerError` if it can't be imported."""
    try:
        return importlib.import_module(IPEX_MODULE)
    # If torch's version does not match, it raises OSError or SystemExit.
    except (Exception, SystemExit) as error:
        raise WorkerError(
            f"--ipex needs {IPEX_MODULE}: {first_line(error)}",
            hint="use a stack that has it, or omit --ipex: torch uses AMX without it",
        ) from error


def prepare(run: TrainingRun, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model as all ranks train it together, and its optimizer, for ``steps`` steps."""
    context, model = run.context, run.loaded.model
    options = context.options
    model.train()
    for parameter in find_idle(run):
        # DistributedDataParallel would wait forever for their gradients.
        parameter.requires_grad_(False)
    ids = run.samples.token_ids()
    # A trial has only some of the data: with their words alone, its steps would be too fast.
    if ids is not None and options.trial_seconds is None and not options.ipex:
        train_used_words(model, [*ids, run.loaded.pad_token])
    rate = options.highest_rate(context.ranks.planned)
    by_layer = options.layer_decay if isinstance(options, TextOptions) else 1.0
    decays = options.weight_decay, by_layer
    why = _compile(run, model, steps)
    if not options.ipex:
        _skip_other_tokens(run)
    optimizer: torch.optim.Optimizer
    if hasattr(model, FAST):
        masters = halve_weights(model) if _may_halve(run) else {}
        optimizer = MasterAdamW(model, masters, rate, options.max_grad_norm, *decays)
    else:
        optimizer = torch.optim.AdamW(
            group_parameters(model, *decays),
            rate,
            weight_decay=0.0,
            fused=not options.ipex,  # IPEX replaces the optimizer's step by its own
        )
    parts = find_parts(model)
    context.events.note(f"fast: {', '.join(parts) or 'nothing'}; {why}")
    if context.precision.int8 and INT8_PRODUCTS not in parts:
        small = f"no linear module of a layer has {LEAST_SIZE} inputs and as many outputs"
        why = small if hasattr(model, FAST) else why
        context.events.note(f"warning: products are in {context.precision.dtype}, not int8: {why}")
    if options.ipex:
        model, optimizer = _optimize_with_ipex(model, optimizer, context.precision.dtype)
    if context.ranks.size == 1:
        return model, optimizer
    bf16, some = options.wire == "bf16", _skips_parts(model)
    replica = Replica(model, context.ranks, bf16, find_unused_parameters=some)
    return replica, optimizer


def find_idle(run: TrainingRun) -> list[Any]:
    """Return the model's parameters that do not affect the loss, such as XLNet's ``mask_emb``.

    Training skips random layers of some models, evaluation none. Experts that one sample does not reach are
    for others.
    """
    model, state = run.loaded.model, torch.get_rng_state()
    idle: set[str] = set()
    try:
        sample = run.task.collate([run.samples[int((*_shortest(run), 0)[0])]], run.loaded)
        with same_modes(model):
            for training in (True, False):
                loss = run.task.loss(model.train(training), sample)
                loss.backward()  # type: ignore[no-untyped-call]
        idle = {
            name
            for name, each in model.named_parameters()
            if each.requires_grad and each.grad is None and not _EXPERT.search(name)
        }
    # Training will report why the model fails on this sample.
    except Exception:
        pass
    finally:
        model.zero_grad(set_to_none=True)
        torch.set_rng_state(state)
    idle.intersection_update(*run.context.ranks.gather(idle))
    return [each for name, each in model.named_parameters() if name in idle]


def _shortest(run: TrainingRun) -> Any:
    """Return the places of the two shortest samples with enough tokens, or of fewer."""
    order = np.argsort(run.lengths, kind="stable")
    return order[run.lengths[order] >= FEWEST_TOKENS][:2]


def _skip_other_tokens(run: TrainingRun) -> None:
    """Compute only what the loss depends on, which the shortest samples tell."""
    if len(short := _shortest(run)) < 2:
        return
    model = run.loaded.model
    sample = run.task.collate([run.samples[int(index)] for index in short], run.loaded)
    skip_other_tokens(model, lambda: run.task.loss(model, sample))


def _skips_parts(model: Any) -> bool:
    """Return whether some steps have no gradients of some layers or experts."""
    settings = vars(getattr(model, "config", None) or object).items()
    drops = any(name.endswith("layerdrop") and value for name, value in settings)
    return drops or any(_EXPERT.search(name) for name, _ in model.named_parameters())


def _may_halve(run: TrainingRun) -> bool:
    """Return whether gradients in bf16 lose nothing: they are added up only over ranks, in bf16."""
    options, ranks = run.context.options, run.context.ranks
    in_parts = count_parts(options, options.batch_size) > 1 or ranks.size < ranks.planned
    wire = ranks.size == 1 or options.wire == "bf16"
    return run.context.precision.dtype == "bf16" and wire and not in_parts


def _compile(run: TrainingRun, model: Any, steps: int) -> str:
    """Compile the model's layers if worthwhile, on all ranks or none, because results would differ.

    Return why they will be compiled or not.
    """
    context, ranks = run.context, run.context.ranks
    options = context.options
    # A planned rank's, so that a run that resumes on fewer makes the same choice.
    tokens = steps * options.batch_size * float(run.lengths.mean())
    tflop = estimate_tflop(model, tokens)
    chosen = choose_compilation(options.compile, context.precision.name, tflop)
    if not chosen.enabled or options.ipex:
        reason = "IPEX optimizes the model itself" if chosen.enabled else chosen.reason
        return f"torch.compile is not used: {reason}"
    keep_compiled(COMPILED)
    troubles = ranks.gather(why_no_compiler())
    wrong = [f"rank {rank}: {trouble}" for rank, trouble in enumerate(troubles) if trouble]
    if wrong:
        return f"torch.compile is not used: {wrong[0]}"
    int8 = context.precision.int8
    FastLayers(model, context.events.note, shared=ranks.size > 1, int8=int8)
    return chosen.reason


def _optimize_with_ipex(model: Any, optimizer: Any, dtype: str) -> tuple[Any, Any]:
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    try:
        model, optimizer = load_ipex().optimize(
            model, optimizer=optimizer, dtype=wanted, inplace=True
        )
    except AssertionError as error:  # the CPU lacks an instruction
        raise WorkerError(
            f"--ipex can't train in {dtype} on this CPU: {first_line(error)}",
            hint="use --dtype auto, or omit --ipex",
        ) from error
    return model, optimizer


def take_step(
    run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer, batch: StepBatch
) -> Step:
    """Take one optimizer step. All ranks' losses are nan if the gradients are not finite on any of them."""
    optimizer.zero_grad(set_to_none=True)
    watch = StepTimer()
    loss = compute_gradients(run, model, batch, watch)
    healthy = _clip_and_update(model, optimizer, run.context.options)
    watch.lap("optimizer")
    # The ranks' parts add up to the loss.
    return Step(float(loss) * run.context.ranks.size if healthy else math.nan, watch.seconds)


def _clip_and_update(model: Any, optimizer: torch.optim.Optimizer, options: TrainOptions) -> bool:
    """Clip the gradients and change the weights; return whether the gradients were finite."""
    if isinstance(optimizer, MasterAdamW):
        return math.isfinite(optimizer.step())
    if options.ipex:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
    else:
        # Finding the parameters in the model's modules would take longer.
        every = (each for group in optimizer.param_groups for each in group["params"])
        norm = torch.nn.utils.get_total_norm([each.grad for each in every if each.grad is not None])
        # The fused step divides by it, as for GradScaler, which saves a pass over the gradients.
        optimizer.grad_scale = (norm / options.max_grad_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    healthy = math.isfinite(float(norm))
    if healthy:
        optimizer.step()
    return healthy


def compute_gradients(
    run: TrainingRun, model: Any, batch: StepBatch, watch: StepTimer
) -> torch.Tensor:
    """Store the gradients of all ranks' mean loss in the model; return this rank's part of the loss.

    Every sample or label has the same weight, even if the ranks have different numbers of them.
    """
    replica = model if isinstance(model, Replica) else None
    parts = batch.split(count_parts(run.context.options, len(batch)))
    losses = []
    for number, (tensors, weight) in enumerate(parts, start=1):
        last = number == len(parts)
        with replica.no_sync() if replica and not last else nullcontext():
            with run.context.autocast():
                loss = run.task.loss(model, tensors) * (weight / batch.total)
            watch.lap("forward")
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        # After the last gradients, the backward pass waits for the network.
        watch.lap("backward", until=replica.last_sent if replica and last else None)
    watch.lap("communication")
    return torch.stack(losses).sum()


def count_parts(options: TrainOptions, samples: int) -> int:
    """Return the number of parts to split a batch into: more for more samples than planned. Pure."""
    return options.accumulate * -(-samples // options.batch_size) if options.splits_batches else 1
