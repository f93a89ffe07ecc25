"""Checkpoints of transformers' ``Trainer`` on nodes without a shared folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..runtime.ranks import Ranks
from .own_model import say

_END = "trainer_state.json"
"""The last file of a checkpoint that Trainer writes."""
_PART = 2**26


class NodeCheckpoints(TrainerCallback):
    """Lets each node that saves checkpoints save whole ones, and all ranks load the same."""

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._train, self._save = trainer.train, trainer._save
        self._load_best = trainer._load_best_model
        trainer.train, trainer._save = self._train_together, self._save_whole
        trainer._load_best_model = self._load_the_best

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A rank does not find it if its node doesn't save checkpoints.
        state.best_model_checkpoint = self._ranks.share(state.best_model_checkpoint)

    def _save_whole(self, *arguments: Any, **named: Any) -> None:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        # Of transformers 5: otherwise only rank 0 writes weights, even with --save_on_each_node.
        model.should_save_on_this_rank = bool
        try:
            self._save(*arguments, **named)
        finally:
            del model.should_save_on_this_rank

    def _load_the_best(self) -> None:
        share_checkpoint(Path(self._trainer.state.best_model_checkpoint), self._ranks)
        self._load_best()

    def _train_together(self, resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
        given, output = resume_from_checkpoint, Path(self._trainer.args.output_dir)
        if given is True:
            given = get_last_checkpoint(str(output)) if output.is_dir() else None
        shared = share_checkpoint(_newest_whole(Path(given)) if given else None, self._ranks)
        return self._train(str(shared) if shared else resume_from_checkpoint, *more, **named)


def _step(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _newest_whole(given: Path) -> Path:
    """Return the newest checkpoint up to ``given`` that was not interrupted, or else ``given``."""
    found = [each.parent for each in given.parent.glob(f"checkpoint-*/{_END}")]
    older = [each for each in found if _step(each) < _step(given)]
    return given if (given / _END).exists() else max(older, key=_step, default=given)


def share_checkpoint(own: Path | None, ranks: Ranks) -> Path | None:
    """Return the newest of all ranks' checkpoints after sending it to the nodes that don't have it whole."""
    names = {str(each.relative_to(own)) for each in own.rglob("*") if each.is_file()} if own else ()
    # Each rank has its own, and resumes without.
    kept = {each for each in names if not each.startswith("rng_state")}
    offers = ranks.gather((_END in kept, _step(own) if own else -1, len(kept), own, kept))
    _, _, _, folder, wanted = best = max(offers, key=lambda each: each[:3])
    source, lacking = offers.index(best), [folder != each[3] or wanted > each[4] for each in offers]
    if not any(lacking):
        return own
    say(ranks, f"{folder} is sent to {sum(lacking)} ranks' nodes: it is not there, or not whole")
    writes = lacking[ranks.rank] and ranks.local.rank == 0
    for name in sorted(wanted, key=lambda each: (each == _END, each)):
        _send(folder / name, ranks, source, writes=writes)
    ranks.gather(None)
    return Path(folder)


def _send(path: Path, ranks: Ranks, source: int, *, writes: bool) -> None:
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
    is_source, box = ranks.rank == source, [b"."]
    used = path if writes or is_source else Path(os.devnull)
    with used.open("wb" if writes else "rb") as file:
        while box[0]:
            box = [b"" if writes else file.read(_PART)]
            dist.broadcast_object_list(box, src=source, group=ranks.control)
            if writes:
                file.write(box[0])
