"""transformers' ``Trainer`` on the fast path: its layers, sums, and batches, and its reports to the job."""

from __future__ import annotations

import gc
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..runtime.context import package_versions
from ..runtime.events import Events, take_mark
from ..runtime.output import Metrics, StepFigures
from ..runtime.process import STOPPED, listen
from ..runtime.ranks import Ranks
from ..runtime.steps import Pace, StepReporter
from .communication import Replica
from .own_checkpoints import NodeCheckpoints
from .own_model import joined_ranks, say, use_fast_layers

OUTPUT = "SPR_OUTPUT"
"""The environment variable of a job's output folder; without it, no job wants reports."""
_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask")
_MULTIPLE, _NO_LABEL = 8, -100


def speed_up_trainer(trainer: Any, bf16: bool) -> Any:
    """Change a Trainer in place, and return it."""
    ranks, kind = joined_ranks(), trainer.accelerator.distributed_type.value
    if trainer.args.device.type != "cpu" or kind not in ("NO", "MULTI_CPU"):
        say(ranks, f"not faster: this Trainer uses {trainer.args.device.type}, {kind}")
    else:
        say(ranks, _compile(trainer, ranks, bf16))
        if ranks.size > 1:
            _average_quickly(trainer.accelerator, ranks, bf16)
            trainer.add_callback(NodeCheckpoints(trainer, ranks))
        _trim_training(trainer, ranks)
    if OUTPUT in os.environ:
        trainer.add_callback(StepReports(trainer, ranks, "bf16" if bf16 else "fp32"))
    return trainer


def _compile(trainer: Any, ranks: Ranks, bf16: bool) -> str:
    if bf16 and not trainer.args.torch_compile:
        return use_fast_layers(trainer.model, ranks)
    reason = "Trainer compiles the model" if bf16 else "it does not speed up fp32"
    return f"layers are not compiled: {reason}"


def _average_quickly(accelerator: Any, ranks: Ranks, bf16: bool) -> None:
    """Let Accelerate wrap models in :class:`Replica`, with its own options, for training."""
    plain, made = accelerator.prepare_model, list[Any]()

    def prepare(model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        prepared = plain(model, device_placement, evaluation_mode=True)
        is_replica = isinstance(prepared, Replica)
        if evaluation_mode or is_replica or not any(p.requires_grad for p in prepared.parameters()):
            return prepared
        # A second one would average gradients again.
        if not made or made[-1].module is not prepared:
            handler = accelerator.ddp_handler
            options = handler.to_kwargs() if handler else {}
            made.append(Replica(prepared, ranks, bf16, 1 / ranks.size, **options))
            made[-1]._is_accelerate_prepared = True
        return made[-1]

    accelerator.prepare_model = prepare


def _trim_training(trainer: Any, ranks: Ranks) -> None:
    plain = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        # Not the collator: evaluation may expect batches of one width, and trainers its attributes.
        # Nor what a user made. Accelerate joins ranks' batches of a stream, which must have one width.
        loader, own = plain(), trainer.data_collator
        inner: Any = getattr(loader, "base_dataloader", None)  # Accelerate's
        collate: Any = getattr(inner, "collate_fn", None)
        is_own = own in (collate, getattr(collate, "data_collator", None))
        if is_own and (ranks.size == 1 or getattr(loader, "split_batches", True)):
            inner.collate_fn = loader.collate_fn = Trimmed(collate)
        return loader

    trainer.get_train_dataloader = get_train_dataloader


class Trimmed:
    """A collator without the last columns of ``collate``'s batches if they are padding in all rows."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return batch
        width, used = mask.shape[1], mask.any(0).nonzero()
        longest = int(used[-1]) + 1 if len(used) else width
        kept = min(width, -(-longest // _MULTIPLE) * _MULTIPLE)
        wide = {
            name: each
            for name, each in batch.items()
            if isinstance(each, torch.Tensor) and each.dim() > 1 and each.shape[1] == width
        }
        for name, each in wide.items():
            is_known = name in _TOKENS and each.dim() == 2
            # Labels of tokens; others could be as many by chance.
            if not is_known and (name != "labels" or not (each[:, kept:] == _NO_LABEL).all()):
                return batch
        for name, each in wide.items():
            batch[name] = each[:, :kept].contiguous()
        return batch


class StepReports(TrainerCallback):
    """Reports a Trainer's steps as events and metrics, as ``spr-cluster train`` does.

    After a SIGTERM, it saves a checkpoint after the same step on all ranks and ends the script with 143.
    """

    def __init__(self, trainer: Any, ranks: Ranks, dtype: str) -> None:
        self._ranks, self._dtype, self._stack = ranks, dtype, ExitStack()
        self._events = Events(ranks.rank, mark=take_mark())
        self._trainer, self._plain = trainer, trainer.training_step
        self._checkpoint, self._stops, self._warned = "", False, False
        self._is_frozen = False
        self._begin = self._last = self._last_loss = self._rate = 0.0
        self._forget()

    def _forget(self) -> None:
        """Start to count the next step."""
        self._samples = self._tokens = self._padded = 0
        self._loss = self._computed = self._waited = 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        ranks, events = self._ranks, self._events
        hosts = ranks.gather(socket.gethostname())
        self._trainer.training_step = self._training_step
        events.emit(
            "start",
            world_size=ranks.size,
            hosts=list(dict.fromkeys(hosts)),
            backend=ranks.backend,
            dtype=self._dtype,
            versions=package_versions(),
        )
        if state.global_step:
            events.emit("resumed", step=state.global_step, total=state.max_steps)
        metrics = Metrics(Path(os.environ[OUTPUT]), ranks.rank, events.note)
        self._request = self._stack.enter_context(listen())
        self._stack.enter_context(metrics)
        try:
            # The last step of an epoch may have fewer parts.
            per_epoch = max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
        except TypeError:  # a stream
            per_epoch = state.max_steps
        counts = state.max_steps, per_epoch, state.global_step, 0, 0
        more = Pace(ranks, hosts), self._request, self._check_loss
        self._reporter = StepReporter(events, metrics, *more, *counts)
        self._begin = self._last = time.perf_counter()

    def _training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Trainer's, measured: the forward and backward pass of a part of a batch."""
        begin = time.perf_counter()
        found = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.dim()}
        self._samples += len(next(iter(found.values()), ()))
        # sentence-transformers has anchor_input_ids, positive_input_ids, ….
        named_ids = [name for name in found if name.endswith("_input_ids")]
        for name in ["input_ids"] if "input_ids" in found else named_ids:
            ids, mask = found[name], found.get(f"{name[:-9]}attention_mask")
            self._padded += ids.numel()
            # Others are values to add to the scores.
            if mask is None or mask.shape != ids.shape or mask.is_floating_point():
                self._tokens += ids.numel()
            else:
                self._tokens += int(mask.sum())
        self._rate = self._trainer.optimizer.param_groups[0]["lr"]
        loss = self._plain(model, inputs, *arguments, **named)
        self._loss += float(loss)  # a part's share
        end, sent = time.perf_counter(), getattr(model, "last_sent", 0.0)
        waited = end - sent if sent > begin else 0.0
        self._computed += end - begin - waited
        self._waited += waited
        return loss

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, step = time.perf_counter(), state.global_step
        whole = now - self._last
        other = max(0.0, whole - self._computed - self._waited)
        seconds = {"compute": self._computed, "communication": self._waited, "other": other}
        counts = self._samples, self._tokens, self._padded
        figures = StepFigures(step, now - self._begin, self._loss, self._rate, *counts, seconds)
        if self._reporter.take(figures, whole - self._waited, now=False, save=False).stop:
            self._stops = control.should_save = control.should_training_stop = True
        if not self._is_frozen:
            # Traversing the objects of torch and its compiler again and again takes 3 % of the time,
            # and so would counting them.
            self._is_frozen = True
            gc.collect()
            gc.freeze()
        self._forget()
        self._last = time.perf_counter()

    def _check_loss(self, figures: StepFigures) -> StepFigures:
        if math.isfinite(figures.loss):
            self._last_loss = figures.loss
        elif not self._warned:
            self._warned = True
            self._events.note(
                f"warning: the loss is {figures.loss} at step {figures.step}; steps show the last one"
            )
        return figures._replace(loss=self._last_loss)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._reporter.finish()
        self._reporter.metrics.flush()
        self._checkpoint, now = f"checkpoint-{state.global_step}", time.perf_counter()
        took = round(now - self._last, 3)
        self._events.emit("checkpoint", step=state.global_step, name=self._checkpoint, seconds=took)
        self._last = now

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = time.perf_counter()  # not a part of the next step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.training_step, self._is_frozen = self._plain, False
        gc.unfreeze()
        self._reporter.finish()
        if not self._stops:
            self._stack.close()
            return
        self._request.stop = False  # else, its end would be by SIGTERM
        self._stack.close()
        step, total = state.global_step, state.max_steps
        self._events.emit("stopped", step=step, total=total, checkpoint=self._checkpoint)
        raise SystemExit(STOPPED)
