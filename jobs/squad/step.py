"""One optimizer step on all ranks: what is made ready once, and what is done each time."""

from __future__ import annotations

import importlib
import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import BackendError, first_line
from .session import Session

if TYPE_CHECKING:
    import torch

IPEX_MODULE = "intel_extension_for_pytorch"
CLIP_NORM = 1.0
PARTS = ("forward", "backward", "optimizer", "communication")
"""Of a step's seconds. What of the communication backward hides is in backward."""


class Step(NamedTuple):
    """One optimizer step: the loss's mean over all ranks, nan where it went wrong on any.

    ``seconds`` are this rank's, by what was done in them.
    """

    loss: float
    seconds: dict[str, float]


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


def prepare(
    session: Session,
    model: Any,
    steps: int,  # noqa: ARG001 - what is made ready for it must pay back
) -> tuple[Any, torch.optim.Optimizer]:
    """The model as all ranks train it together for so many steps, and its optimizer."""
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


def take_step(
    session: Session, model: Any, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> Step:
    """One optimizer step.

    Loss and gradients are the same on all ranks when looked at, so all of them stop together.
    """
    import torch

    times = [time.perf_counter()]
    optimizer.zero_grad(set_to_none=True)
    with session.autocast():
        loss = model(**tensors).loss
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    finite = math.isfinite(float(norm))
    if finite:
        optimizer.step()
    times.append(time.perf_counter())
    mean = session.ranks.mean(loss) if finite else math.nan
    times.append(time.perf_counter())
    spent = (after - before for before, after in pairwise(times))
    return Step(mean, dict(zip(PARTS, spent, strict=True)))
