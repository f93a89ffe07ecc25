"""A user's own model: its ranks, its layers, and what is said of them."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.process import RankIdentity, read_local_place
from ..runtime.ranks import Ranks, new_group
from .compilation import COMPILED, FAST, is_compiled, keep_compiled, why_no_compiler
from .first_batches import FastLayers
from .parts import find_parts


def say(ranks: Ranks, text: str) -> None:
    """Print a line for the user, once."""
    if ranks.first:
        print(f"spr_cluster: {text}", file=sys.stderr, flush=True)


def _wait_for_torch() -> None:
    """Let torch's threads release the tensors of the last collective operation.

    They need Python's global interpreter lock for that. While the interpreter exits, waiting for it aborts
    the process (torch 2.13, in 1 of 4 runs).
    """
    time.sleep(0.2)


def joined_ranks() -> Ranks:
    """Return the ranks of torch's process group; without one, this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(RankIdentity(), "none", "one process", None, read_local_place({}))
    # Not mpirun's variables: the script may run under a torchrun that mpirun has started.
    names = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ]
    local = read_local_place({name: os.environ[name] for name in names})
    identity = RankIdentity(dist.get_rank(), dist.get_world_size())
    control = new_group()
    atexit.unregister(_wait_for_torch)
    atexit.register(_wait_for_torch)
    return Ranks(identity, str(dist.get_backend()), "chosen by the script", control, local)


def use_fast_layers(model: Any, ranks: Ranks) -> str:
    """Compile a model's layers on all ranks, or on none; return what it has done."""
    keep_compiled(COMPILED)
    with torch.random.fork_rng(devices=[]), _same_verbosity():
        if FAST not in vars(model):  # as for another Trainer with the same model
            compiled = "the model is already compiled" if is_compiled(model) else None
            troubles = ranks.gather(compiled or why_no_compiler())
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
            if wrong:
                return f"layers are not compiled: {wrong[0]}"
            first = Ranks(ranks.identity)  # without the group: a copy of the model must be possible
            FastLayers(model, lambda text: say(first, text), shared=ranks.size > 1)
        return f"fast: {', '.join(find_parts(model)) or 'nothing'}"


@contextmanager
def _same_verbosity() -> Iterator[None]:
    """Restore transformers' verbosity after a ``with`` block."""
    transformers = sys.modules.get("transformers")
    before = transformers.logging.get_verbosity() if transformers else None
    yield
    if transformers:
        transformers.logging.set_verbosity(before)
