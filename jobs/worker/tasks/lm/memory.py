"""The memory that a rank will need, before the weights are loaded: a step is simulated without any data.

The model runs forward and backward on tensors that have a shape and a type and no content. What they would
take at their peak, with the weights and the optimizer's state, is added to what the process has now.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...bench.measure import read_available_bytes
from ...fast.compilation import find_layers
from ...fast.int8 import use_int8
from ...fast.layers import freeze_layers
from ...runtime.errors import ModelError, first_line
from ...runtime.precision import autocast
from ...training.batches import ALIGN
from ...training.model import choose_attention
from ...training.optimizer_step import count_parts
from .head import use_chunks
from .model import LmOptions, prepare_model

if TYPE_CHECKING:
    from ...training.state import TrainContext

ADAM_BYTES = 8
"""AdamW's two averages for each trained weight, in fp32."""
BEST_BYTES = 4
"""The copy of each trained weight that evaluation while training keeps, on rank 0."""
LATER_BYTES = 100_000_000
"""Libraries that are imported later, and oneDNN's buffers (measured: benchmarks/log.jsonl)."""
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# For each version of control groups: limit, usage, and the line of memory.stat with reclaimable memory.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Plan(NamedTuple):
    """What determines a step's memory."""

    options: LmOptions
    dtype: str
    ranks: int
    width: int | None = None
    """Tokens of the longest sample, if they do not fill ``--max-length``."""

    @property
    def loaded_as(self) -> str:
        """The weights' type: bf16 if only adapters are trained, since products would convert them."""
        return "bfloat16" if self.options.lora and self.dtype == "bf16" else "float32"


def require_memory(context: TrainContext, plan: Plan, source: Any) -> None:
    """Note the memory that each rank needs. Raises :class:`ModelError` on all if one has too little.

    ``source`` is the model's name, folder, or configuration.
    """
    step, trouble = 0, ""
    try:
        step = simulate(plan, source)
    # Some models can't run without content, and a wrong name is explained when it is loaded.
    except Exception as error:
        trouble = f"{type(error).__name__}: {first_line(error)}"
    ranks, held = context.ranks, read_held_bytes() + LATER_BYTES
    own = held + step, held + read_free_bytes() // ranks.local.size, trouble
    found: list[tuple[int, int, str]] = ranks.gather(own)
    if troubles := [each for *_, each in found if each]:
        context.events.note(f"the memory it needs is not known: {troubles[0]}")
        return
    rank = min(range(len(found)), key=lambda n: found[n][1] - found[n][0])
    need, room, _ = found[rank]
    text = f"needs about {_gb(need)} of memory per rank"
    if need > room:
        host = f" on {context.hosts[rank]}" if context.hosts else ""
        raise ModelError(
            f"training {plan.options.model} {text}, and rank {rank} can have {_gb(room)}{host}",
            hint=f"use {', '.join(_savings(plan.options))}",
        )
    context.events.note(f"{text}; each can have {_gb(room)}")


def _savings(options: LmOptions) -> Iterator[str]:
    if not options.gradient_checkpointing:
        yield "--gradient-checkpointing"
    if not options.lora:
        yield "--lora"
    if options.accumulate < options.batch_size:
        yield f"--accumulate {min(2 * options.accumulate, options.batch_size)}"
    yield "a smaller --batch-size or --max-length, fewer ranks per node (--ppn), or a smaller model"


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def simulate(plan: Plan, source: Any) -> int:
    """Return the most bytes of tensors at any time of a training step of one rank."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    options = plan.options
    config = source
    if isinstance(source, str):
        folder = Path(source).expanduser()
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else source)
    rows = -(-options.batch_size // count_parts(options, options.batch_size))
    with FakeTensorMode(), torch.random.fork_rng(), _without_content():
        model = AutoModelForCausalLM.from_config(
            config, dtype=plan.loaded_as, **choose_attention(config)
        )
        use_chunks(model)
        # peft moves its adapters to where they are already, which fails without content.
        with patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
            model = prepare_model(model, options).train()
            freeze_layers(model, options.freeze_layers)
        if options.dtype == "int8":
            use_int8(find_layers(model))
        rounded = [each for module in model.modules() for each in vars(module).get("rounded") or ()]
        trained = [each for each in model.parameters() if each.requires_grad]
        if plan.ranks > 1:  # DistributedDataParallel keeps the gradients' memory
            for each in trained:
                each.grad = torch.empty_like(each)
        width = min(plan.width or options.max_length, options.max_length)
        ids = torch.zeros((rows, -(-width // ALIGN) * ALIGN), dtype=torch.int64)
        live = LiveBytes()
        with live:
            live.add(*model.parameters(), *model.buffers(), *rounded)
            live.add(*(each.grad for each in trained))
            with autocast(plan.dtype):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
    weights: int = sum(each.numel() for each in trained)
    unseen = options.eval or options.eval_fraction
    keeps_best = unseen and options.keep == "best" and options.eval_every != "never"
    return live.peak + (ADAM_BYTES + (BEST_BYTES if keeps_best else 0)) * weights


@contextmanager
def _without_content() -> Iterator[None]:
    """Replace what looks at the content of tensors, or what torch simulates only in bf16."""
    from transformers.masking_utils import AttentionMaskInterface

    def multiply(rows: Tensor, experts: Tensor, offs: Tensor, **_: Any) -> Tensor:
        product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, experts, offs)
        return product

    # Fused attention has no mask if no token is padding.
    masks = patch.dict(AttentionMaskInterface._global_mapping, sdpa=lambda *_, **__: None)
    products = patch.object(torch, "_grouped_mm", multiply, create=True)
    # It writes a traceback for each operation that fails.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with masks, products, patch.object(logger, "disabled", True):
        yield


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the memory of all tensors that operations return, for as long as each exists."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def add(self, *tensors: Any) -> None:
        """Count tensors whose memory is not yet counted."""
        for storage in (each.untyped_storage() for each in tensors if isinstance(each, Tensor)):
            key, size = id(storage), storage.nbytes()
            if key not in self._known:
                self._known[key] = weakref.ref(storage, partial(self._forget, key, size))
                self.now += size
                self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(*tree_leaves(result))
        return result


def read_held_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read_free_bytes(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> int:
    """Return the memory that this process's machine and its control groups have left."""
    return min([read_available_bytes(), *_left_in_groups(membership, groups)])


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    for line in membership.read_text().splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = groups / "memory" if kinds else groups
        # A container sees its own group as the root.
        folder = root / name.lstrip("/")
        for each in (folder, *folder.parents):
            for limit, used, cached in _FILES:
                if (each / limit).is_file() and (each / used).is_file():
                    yield from _left(each, limit, used, cached)
            if each == root:
                break


def _left(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    most = (folder / limit).read_text().strip()
    if most == "max":
        return
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in lines)
    yield int(most) - int((folder / used).read_text()) + int(stat.get(cached, 0))
