"""One optimizer step on all ranks, and what is prepared once for all steps."""

from __future__ import annotations

import importlib
import math
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ..runtime.errors import BackendError, first_line
from ..runtime.ranks import Ranks
from .all_reduce import choose_all_reduce
from .batches import trim
from .communication import Replica
from .compilation import choose_compilation, compile_layers, why_no_compiler
from .dropout import draw_seeds
from .model import Loaded
from .options import TrainOptions
from .state import TrainContext

IPEX_MODULE = "intel_extension_for_pytorch"
CLIP_NORM = 1.0


class Step(NamedTuple):
    """A finished step: the mean ``loss`` of all ranks, and this rank's seconds by activity.

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
        """Add the time since the last lap, up to now or to ``until``, to that activity."""
        now = time.perf_counter() if until is None else until
        self.seconds[name] += now - self._last
        self._last = now


def load_ipex() -> Any:
    """Return Intel Extension for PyTorch. Raises :class:`BackendError` if it can't be imported."""
    try:
        return importlib.import_module(IPEX_MODULE)
    # If torch's version does not match, it raises OSError or SystemExit.
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"--ipex needs {IPEX_MODULE}: {first_line(error)}",
            hint="use a stack that has it, or omit --ipex: torch uses AMX without it",
        ) from error


def prepare(context: TrainContext, loaded: Loaded, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model as all ranks train it together, and its optimizer, for ``steps`` steps."""
    options, model = context.options, loaded.model
    model.train()
    for parameter in find_idle(loaded):
        # DistributedDataParallel would wait for gradients that never come.
        parameter.requires_grad_(False)
    # IPEX replaces the optimizer's step by its own.
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.highest_rate(context.ranks.planned),
        weight_decay=0.0,
        fused=not options.ipex,
    )
    if options.ipex:
        model, optimizer = _optimize_with_ipex(model, optimizer, context.precision.dtype)
    _compile(context, model, steps)
    return share_gradients(context, model), optimizer


def find_idle(loaded: Loaded) -> list[Any]:
    """Return the model's parameters that do not affect answers, such as XLNet's ``mask_emb``."""
    model, state = loaded.model, torch.get_rng_state()
    # Any token IDs will do; which inputs there are decides which parameters take part.
    ids = torch.full((1, 16), 3)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "token_type_ids" in loaded.tokenizer.model_input_names:
        tensors["token_type_ids"] = torch.zeros_like(ids)
    place = torch.tensor([1])
    try:
        model(**tensors, start_positions=place, end_positions=place).loss.backward()
        return [each for each in model.parameters() if each.requires_grad and each.grad is None]
    # A model that fails on these tokens will report why in training.
    except Exception:
        return []
    finally:
        model.zero_grad(set_to_none=True)
        torch.set_rng_state(state)


def share_gradients(context: TrainContext, model: Any) -> Any:
    """Return the model with gradients averaged over all ranks, or unchanged if there is only one."""
    if context.ranks.size == 1:
        return model
    wire = torch.bfloat16 if context.options.wire == "bf16" else torch.float32
    return Replica(model, wire, context.ranks.control, choose_all_reduce(context.ranks))


def _compile(context: TrainContext, model: Any, steps: int) -> None:
    """Compile the model's layers if it pays, on all ranks or none: results would differ."""
    ranks, note = context.ranks, context.events.note
    options = context.options
    chosen = choose_compilation(options.compile, context.precision.dtype, steps)
    if not chosen.enabled or options.ipex:
        reason = "IPEX optimizes the model itself" if chosen.enabled else chosen.reason
        note(f"torch.compile is not used: {reason}")
        return
    troubles = ranks.gather(why_no_compiler())
    wrong = [f"rank {rank}: {trouble}" for rank, trouble in enumerate(troubles) if trouble]
    if wrong:
        note(f"torch.compile is not used: {wrong[0]}")
        return
    count = compile_layers(model, shared=ranks.size > 1)
    note(f"torch.compile, {count} layers: {chosen.reason}")


def _optimize_with_ipex(model: Any, optimizer: Any, dtype: str) -> tuple[Any, Any]:
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    try:
        model, optimizer = load_ipex().optimize(
            model, optimizer=optimizer, dtype=wanted, inplace=True
        )
    except AssertionError as error:  # the CPU lacks an instruction
        raise BackendError(
            f"--ipex can't train in {dtype} on this CPU: {first_line(error)}",
            hint="use --dtype auto, or omit --ipex",
        ) from error
    return model, optimizer


def take_step(
    context: TrainContext,
    model: Any,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
) -> Step:
    """Take one optimizer step. The loss is nan if the gradients are not finite on any rank.

    All ranks see the same loss and gradients, so they stop together.
    """
    optimizer.zero_grad(set_to_none=True)
    watch = StepTimer()
    loss = average_gradients(context, model, tensors, watch)
    healthy = _clip_and_update(model, optimizer, ipex=context.options.ipex)
    watch.lap("optimizer")
    mean = context.ranks.mean(loss) if healthy else math.nan
    watch.lap("communication")
    return Step(mean, watch.seconds)


def _clip_and_update(model: Any, optimizer: torch.optim.Optimizer, *, ipex: bool) -> bool:
    """Clip the gradients and change the weights; return whether the gradients were finite."""
    if ipex:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    else:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # The fused step divides by it, as GradScaler asks it to: one pass over the gradients less.
        optimizer.grad_scale = (norm / CLIP_NORM).clamp(min=1.0)  # type: ignore[attr-defined]
    healthy = math.isfinite(float(norm))
    if healthy:
        optimizer.step()
    return healthy


def average_gradients(
    context: TrainContext,
    model: Any,
    tensors: dict[str, torch.Tensor],
    watch: StepTimer,
) -> torch.Tensor:
    """Put the gradients of all ranks' features in the model, and return this rank's mean loss.

    Every feature counts the same, also where the ranks have different numbers of them.
    """
    replica = model if isinstance(model, Replica) else None
    seen_words = replica.announce(tensors["input_ids"]) if replica else None
    own = len(tensors["input_ids"])
    parts = split(tensors, count_parts(context.options, own))
    weight = weigh(context.ranks, own)
    losses = []
    for number, part in enumerate(parts, start=1):
        last = number == len(parts)
        with replica.no_sync() if replica and not last else nullcontext():
            draw_seeds(model)
            with context.autocast():
                loss = model(**part).loss * (weight * len(part["input_ids"]) / own)
            watch.lap("forward")
            loss.backward()
        losses.append(loss.detach())
        # After the last gradients, the backward pass waits for the network.
        watch.lap("backward", until=replica.last_sent if replica and last else None)
    if replica and seen_words:
        replica.average_words(seen_words)
    watch.lap("communication")
    return torch.stack(losses).sum()


def count_parts(options: TrainOptions, features: int) -> int:
    """Return into how many parts a batch is split: with more features than planned, into more. Pure."""
    return options.accumulate * -(-features // options.batch_size)


def weigh(ranks: Ranks, features: int) -> float:
    """Return the weight of this rank's mean in that of all ranks: 1 if there are as many as planned."""
    if ranks.size == ranks.planned:
        return 1.0
    total: int = sum(ranks.gather(features))
    return features * ranks.size / total


def split(tensors: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """Split a batch into at most ``parts``, each as narrow as its longest feature allows."""
    if parts == 1:
        return [tensors]
    rows = -(-len(tensors["input_ids"]) // parts)
    columns = {name: torch.split(values, rows) for name, values in tensors.items()}
    count = len(columns["input_ids"])
    return [trim({name: each[n] for name, each in columns.items()}) for n in range(count)]
