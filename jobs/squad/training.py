"""Train with DistributedDataParallel: AdamW, a rate that rises and falls linearly, clipping."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .batches import collate, epoch_batches, label, steps_per_epoch
from .errors import BackendError, TrainingError, first_line
from .features import Feature, lengths
from .model import Loaded
from .options import TrainOptions
from .session import Session

if TYPE_CHECKING:
    import torch

IPEX_MODULE = "intel_extension_for_pytorch"
CLIP_NORM = 1.0
CURVE_POINTS = 500
"""About so many points of the loss curve are kept, whatever the number of steps."""


@dataclass(frozen=True)
class Trained:
    """What training did; ``samples`` (features, repeated ones included) are those of all ranks.

    ``loss_curve`` holds (step, mean loss of all ranks).
    """

    loss_curve: list[tuple[int, float]]
    samples: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of one run, the same number on every rank."""

    per_epoch: int
    total: int
    warmup: int

    def rate(self, step: int) -> float:
        """The share of the highest learning rate that step (from 0) uses; never quite 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return max(self.total - step, 1) / (self.total - self.warmup)


def plan_schedule(options: TrainOptions, features: int, ranks: int) -> Schedule:
    """How many steps a run takes."""
    per_epoch = steps_per_epoch(features, options.batch_size, ranks)
    total = per_epoch * options.epochs
    if options.max_steps is not None:
        total = min(total, options.max_steps)
    # At most total - 1: after the last step the scheduler asks for one rate more.
    return Schedule(per_epoch, total, min(math.ceil(total * options.warmup_ratio), total - 1))


def load_ipex() -> Any:
    """Intel Extension for PyTorch; raises :class:`BackendError` where it can't be imported."""
    try:
        return importlib.import_module(IPEX_MODULE)
    # Beside ImportError, it ends with OSError or SystemExit where torch's version does not match.
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"--ipex needs {IPEX_MODULE}: {first_line(error)}",
            hint="use a stack that has it, or leave --ipex out: torch uses AMX by itself",
        ) from error


def train(session: Session, loaded: Loaded, features: Sequence[Feature]) -> Trained:
    """Train the loaded model in place on all ranks; raises :class:`TrainingError`."""
    import torch

    options, ranks = session.options, session.ranks
    schedule = plan_schedule(options, len(features), ranks.size)
    torch.manual_seed(options.seed + ranks.rank)  # each rank drops out other units
    model, optimizer = prepare(session, loaded.model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    every = -(-schedule.total // CURVE_POINTS)
    curve: list[tuple[int, float]] = []
    samples, begin = 0, time.perf_counter()
    for step, batch in enumerate(batches(session, features, schedule), start=1):
        tensors = collate(batch, loaded.pad_token) | label(batch)
        loss = take_step(session, model, optimizer, tensors)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss or its gradient became infinite at step {step} of {schedule.total}",
                hint="lower --learning-rate, or use --dtype fp32",
            )
        samples += len(batch) * ranks.size
        if step % every == 0 or step == schedule.total:
            curve.append((step, round(loss, 5)))
        session.events.step(
            step,
            schedule.total,
            epoch=round(step / schedule.per_epoch, 3),
            loss=round(loss, 5),
            lr=scheduler.get_last_lr()[0],
            samples_per_second=round(samples / (time.perf_counter() - begin), 2),
        )
        scheduler.step()
    return Trained(curve, samples, time.perf_counter() - begin)


def prepare(session: Session, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model as all ranks train it together, and its optimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    options = session.options
    model.train()
    # IPEX replaces the optimizer's step by its own.
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=not options.ipex
    )
    if options.ipex:
        model, optimizer = _optimize_with_ipex(model, optimizer, session.precision.dtype)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def _optimize_with_ipex(model: Any, optimizer: Any, dtype: str) -> tuple[Any, Any]:
    import torch

    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    try:
        model, optimizer = load_ipex().optimize(
            model, optimizer=optimizer, dtype=wanted, inplace=True
        )
    except AssertionError as error:  # its way to say that the CPU lacks an instruction
        raise BackendError(
            f"--ipex can't train in {dtype} on this CPU: {first_line(error)}",
            hint="use --dtype auto, or leave --ipex out",
        ) from error
    return model, optimizer


def batches(
    session: Session, features: Sequence[Feature], schedule: Schedule
) -> Iterator[list[Feature]]:
    """This rank's batches, epoch after epoch, as many as the schedule has steps."""
    options, ranks = session.options, session.ranks
    sizes = lengths(features)
    for first in range(0, schedule.total, schedule.per_epoch):
        seed = (options.seed, first)
        epoch = epoch_batches(sizes, options.batch_size, ranks.rank, ranks.size, seed)
        for batch in epoch[: schedule.total - first]:
            yield [features[index] for index in batch]


def take_step(
    session: Session, model: Any, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> float:
    """One optimizer step; the loss's mean over all ranks, or nan where it went wrong on any.

    Loss and gradients are the same on all ranks when looked at, so all of them stop together.
    """
    import torch

    optimizer.zero_grad(set_to_none=True)
    with session.autocast():
        loss = model(**tensors).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    if not math.isfinite(float(norm)):
        return math.nan
    optimizer.step()
    return session.ranks.mean(loss)
