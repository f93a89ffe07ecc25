"""The fast path for a user's own script, for a model or transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

from .communication import Replica
from .own_model import joined_ranks, say, use_fast_layers


def speed_up(target: Any, *, bf16: bool | None = None, **options: Any) -> Any:
    """Speed up training with a model or a transformers ``Trainer``, on CPUs.

    A model comes back as it replaces DistributedDataParallel's in a loop, with ``options`` for that; a single
    rank gets the model itself. A Trainer is changed in place, before ``train()``. All ranks must call it.

    With ``bf16``, layers are compiled and gradients are sent in bf16. Its default is Trainer's argument, and
    True for a model, whose loop uses autocast.
    """
    if hasattr(target, "training_step") and hasattr(target, "accelerator"):
        # It needs transformers.
        from .own_trainer import speed_up_trainer  # noqa: PLC0415

        return speed_up_trainer(target, target.args.bf16 if bf16 is None else bf16)
    ranks, is_bf16 = joined_ranks(), bf16 is not False
    if is_bf16:
        say(ranks, use_fast_layers(target, ranks))
    share = 1 / ranks.size
    return target if share == 1 else Replica(target, ranks, is_bf16, share, **options)
