"""Checkpoints: a run's state on rank 0's disk, which ``--resume`` continues bit for bit.

output.state/checkpoints/step-000123/
    state.pt         weights, the optimizer's state, every rank's random state, the best weights so far
    checkpoint.json  :class:`Checkpoint`, and a digest of both files

A folder is written under a temporary name, synced to the disk, and then renamed, so that every checkpoint
is complete. Only rank 0 has them: ranks on a replacement machine get everything from rank 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..runtime.checkpoint_names import CHECKPOINTS, LAST, checkpoint_name, step_of
from ..runtime.errors import MORE_SPACE, CheckpointError, first_line
from ..runtime.output import state_folder
from ..runtime.process import has_supervisor
from ..runtime.ranks import Ranks
from .options import ANY_RUN, MAY_CHANGE, NEVER, TrainOptions, flag
from .state import (
    State,
    TrainContext,
    TrainingProgress,
    random_state,
    set_random_state,
    share_tensors,
)

if TYPE_CHECKING:
    from .batches import TrainingRun

_PARTIAL = ".partial"
EVERY_SECONDS = 600.0
"""A failing machine costs at most this much training, on average half of it."""
MOST_SHARE = 0.02
"""Writing takes at most this fraction of the time, on any disk."""
SLOWEST_DISK = 125 << 20
"""Bytes per second that any disk of a node writes: EBS's least."""
_WORTH_TELLING = 20.0
_ADAM_BYTES, _COPIES = 8, 2
WORTH_SECONDS = 60.0
"""A checkpoint older than this is followed by one after the last step: evaluation may be interrupted."""


class RunIdentity(NamedTuple):
    """The definition of a run: after a change to any field, the run can't be resumed."""

    world_size: int
    dtype: str
    features: str
    """A digest of the training samples; only on rank 0."""
    options: dict[str, Any]
    ground: Mapping[str, str]
    """What may change the last bits of the results. A change is reported, not rejected."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, without its tensors."""

    identity: RunIdentity
    progress: TrainingProgress


@dataclass
class CheckpointTimer:
    """Decides when to save: every N steps or, if ``every`` is ``None``, by rank 0's clock."""

    every: int | None
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None
    _cost: float = 0.0

    def by_step(self, step: int, *, last: bool) -> bool:
        """Return whether a checkpoint is due after this step; the same on every rank."""
        last = last and self.every != NEVER
        return self.every is not None and (last or step % self.every == 0)

    def by_time(self, *, last: bool) -> bool:
        """Return whether a checkpoint is due now, by this rank's clock."""
        now = self.clock()
        self._since = now if self._since is None else self._since
        if self.every is not None:
            return False
        least = self._cost / MOST_SHARE
        return now - self._since >= max(WORTH_SECONDS if last else EVERY_SECONDS, least)

    def saved(self, seconds: float) -> None:
        """Record a checkpoint and its duration."""
        self._since, self._cost = self.clock(), seconds


def identify(
    options: TrainOptions, ranks: Ranks, dtype: str, run: TrainingRun, ground: Mapping[str, str]
) -> RunIdentity:
    """Return this run's identity."""
    known = {k: v for k, v in asdict(options).items() if k not in ANY_RUN}
    # Only rank 0 compares.
    return RunIdentity(ranks.planned, dtype, run.digest() if ranks.first else "", known, ground)


def count_saved(model: torch.nn.Module) -> int:
    """Return the bytes of ``model/``, before :func:`prepare`; peft's models write only adapters."""
    all_weights = not hasattr(model, "peft_config")
    return sum(each.nbytes for each in model.parameters() if each.requires_grad or all_weights)


def expect_checkpoints(
    context: TrainContext, model: torch.nn.Module, steps: int, saved: int, *, keeps_best: bool
) -> None:
    """Tell how long the first checkpoint may take, if that is long; ``saved`` is of :func:`count_saved`.

    Raises :class:`CheckpointError` on all ranks if the disk of the first node has too little room for them.
    """
    options, hosts = context.options, context.hosts
    every = options.checkpoint_every or 1  # how many its clock allows is not known
    count = 0 if every == NEVER else -(-steps // every) + 1  # a stop writes one more
    times, state = 2 if keeps_best else 1, model.state_dict()  # with the masters of bf16 weights
    trained = [(state.get(n, p), p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    one = sum(times * each.nbytes + _ADAM_BYTES * size for each, size in trained) if count else 0

    def need(keep: int) -> int:
        # A new one is complete before the oldest one goes, and the model comes beside the others.
        return max(min(keep + 1, count) * one, min(keep, count) * one + saved)

    free = context.ranks.gather(_find_room(state_folder(context.output) / CHECKPOINTS))
    keep, where = options.keep_checkpoints, f" on {hosts[0]}" if hosts else ""
    if (lack := need(keep) - free[0]) > 0:
        ways = ["--keep-checkpoints 1"] * (keep > 1 and need(1) <= free[0])
        ways += ["--lora"] * (getattr(options, "lora", None) is False)
        more = f"{-(-lack // 2**30)} GiB"
        larger = f"disks that are {more} larger (`up --volume-gib`)"
        ways.append(larger if has_supervisor() else f"{more} more: {MORE_SPACE}")
        what = "checkpoints need" if count else "the model needs"
        raise CheckpointError(
            f"{what} {need(keep) / 1e9:.1f} GB of disk, and {free[0] / 1e9:.1f} GB are free{where}",
            hint=f"use {' or '.join(ways)}",
        )
    # Elsewhere, nodes often share a disk, and there are no copies.
    others = [n for n in range(len(hosts)) if hosts[n] != hosts[0]] if has_supervisor() else []
    best, copies = max((free[n] for n in others), default=0), min(_COPIES + 1, count) * one
    if others and best < copies:
        context.events.note(
            f"warning: copies of checkpoints need {copies / 1e9:.1f} GB of disk, and no other node has more "
            f"than {best / 1e9:.1f} GB free: a job that loses its first node may start over"
        )
    if (seconds := one / SLOWEST_DISK) > _WORTH_TELLING:
        context.events.emit("checkpoint_estimate", seconds=round(seconds, 1))


def _find_room(folder: Path) -> int:
    """Return the bytes that checkpoints can have there: what is free, and what older ones take."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    older = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # an older copy may be removed meanwhile
                older += Path(parent, name).stat().st_size
    return shutil.disk_usage(place).free + older


def save_checkpoint(output: Path, checkpoint: Checkpoint, state: State, ranks: Ranks) -> str:
    """Write a checkpoint of all ranks to the disk, and return its name on every rank.

    Raises :class:`CheckpointError` on every rank if it can't be written.
    """
    # Next, the supervisor's loop copies it to a second node and stores it in the job's bucket (transfers.py).
    randoms = ranks.gather(random_state())
    folder, trouble = state_folder(output) / CHECKPOINTS, ""
    target = folder / checkpoint_name(checkpoint.progress.step)
    if ranks.first:
        try:
            _write(target, checkpoint, state, randoms)
        except (OSError, RuntimeError) as error:  # torch's writer also raises others
            shutil.rmtree(_partial_path(target), ignore_errors=True)
            trouble = f"checkpoint {target} can't be written: {first_line(error)}"
    trouble = ranks.share(trouble)
    if trouble:
        raise CheckpointError(
            trouble,
            hint="free disk space, or use --keep-checkpoints 1; earlier checkpoints, if any, are kept",
        )
    return target.name


def _partial_path(target: Path) -> Path:
    """Return where a checkpoint is while it is written or removed."""
    return target.with_name(target.name + _PARTIAL)


def _write(target: Path, checkpoint: Checkpoint, state: State, randoms: list[Any]) -> None:
    partial = _partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {
        "model": trained_weights(state.model),
        "optimizer": state.optimizer.state_dict(),
        "random": randoms,
        "best": state.best,
    }
    with (partial / "state.pt").open("wb") as file:
        torch.save(tensors, file)
        os.fsync(file.fileno())
    with (partial / LAST).open("w", encoding="utf-8") as text:
        content = {
            "identity": checkpoint.identity._asdict(),
            "progress": asdict(checkpoint.progress),
        }
        json.dump({**content, "digest": _digest(partial, content)}, text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    _folder_to_disk(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _folder_to_disk(target.parent)


def _digest(folder: Path, content: Mapping[str, Any]) -> str:
    """Return a digest of a checkpoint's tensors and ``content``: torch finds no changed byte."""
    found = hashlib.sha256(json.dumps(content).encode())
    with (folder / "state.pt").open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def trained_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's state without the weights that training leaves as they are."""
    frozen = frozen_weights(model)
    return {name: each for name, each in model.state_dict().items() if name not in frozen}


def frozen_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Return the weights that training leaves as they are, such as those below adapters."""
    every = model.named_parameters(remove_duplicate=False)
    return {name: each for name, each in every if not each.requires_grad}


def _folder_to_disk(folder: Path) -> None:
    """Sync a folder, which holds the names of its files."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    every = (state_folder(output) / CHECKPOINTS).glob("*")
    return sorted((path for path in every if step_of(path) >= 0), key=step_of)


def prune(output: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and unfinished ones."""
    for path in list_checkpoints(output)[:-keep]:
        # Renamed first: an interrupted removal must not leave half a checkpoint.
        gone = path.rename(_partial_path(path))
        shutil.rmtree(gone, ignore_errors=True)
    for path in (state_folder(output) / CHECKPOINTS).glob(f"*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def newest_undamaged(output: Path, note: Callable[[str], object]) -> tuple[Path, Checkpoint] | None:
    """Return the newest checkpoint that can be read, after removing damaged ones newer than it.

    Raises :class:`CheckpointError` if all are damaged.
    """
    found = list_checkpoints(output)
    for folder in reversed(found):
        try:
            return folder, read_checkpoint(folder)
        except CheckpointError as error:
            if folder == found[0]:
                raise
            note(f"warning: {error.message}; it is removed, and the one before it is used")
            shutil.rmtree(folder.rename(_partial_path(folder)), ignore_errors=True)
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return a checkpoint's description. Raises :class:`CheckpointError`, also for damaged tensors."""
    try:
        content = json.loads((folder / LAST).read_text(encoding="utf-8"))
        if content.pop("digest", None) != _digest(folder, content):
            raise ValueError("its files have changed since it was written")
        progress = TrainingProgress.from_dict(content["progress"])
        return Checkpoint(RunIdentity(**content["identity"]), progress)
    # A damaged file can raise anything.
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {folder} can't be read: {first_line(error)}",
            hint="remove that folder to use the checkpoint before it",
        ) from error


def _start_over() -> str:
    """Return how to start over. Without a supervisor, the job's command always has ``--resume``."""
    elsewhere = "by moving output.state/ away or, on Kubernetes, with another --job-name"
    return f"start over {'without --resume' if has_supervisor() else elsewhere}"


def require_same(saved: RunIdentity, now: RunIdentity) -> list[str]:
    """Return the permitted changes, such as ``--learning-rate 1e-05 (it was 5e-05)``.

    Raises :class:`CheckpointError`, naming the differences, if the run can't be resumed.
    """
    if saved.world_size != now.world_size:
        raise CheckpointError(
            f"the checkpoint has {saved.world_size} ranks, this run {now.world_size}",
            hint=f"resume with {saved.world_size} ranks, or {_start_over()}",
        )
    then = saved.options
    changed = {
        name: f"{flag(name)} {now.options.get(name)} (it was {then.get(name)})"
        for name in sorted({*saved.options, *now.options})
        if then.get(name) != now.options.get(name)
    }
    if refused := [text for name, text in changed.items() if name not in MAY_CHANGE]:
        raise CheckpointError(
            f"a run can't be resumed with other options: {', '.join(refused)}",
            hint=f"resume with the original options, or {_start_over()}",
        )
    if saved.features != now.features:
        raise CheckpointError(
            "the training data has changed since the run began",
            hint=f"use the original data, or {_start_over()}",
        )
    permitted = list(changed.values())
    if saved.dtype != now.dtype:
        permitted.append(f"arithmetic in {now.dtype} (it was {saved.dtype})")
    both = saved.ground.keys() & now.ground.keys()
    changes = sorted(name for name in both if saved.ground[name] != now.ground[name])
    permitted += [f"{name} {now.ground[name]} (it was {saved.ground[name]})" for name in changes]
    return permitted


def load_state(folder: Path | None, state: State, ranks: Ranks) -> None:
    """Load rank 0's undamaged checkpoint ``folder`` into every rank's model, optimizer, and random state.

    Raises :class:`CheckpointError` if it is of another model.
    """
    state.best.clear()
    read = None
    if folder is not None:
        read = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        state.best.update(read.pop("best"))  # only rank 0 needs them
    tensors = share_tensors(read, ranks)
    try:
        state.model.load_state_dict({**frozen_weights(state.model), **tensors["model"]})
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {str(error).splitlines()[-1].strip()}",
            hint=f"it may be from another version of spr-cluster: {_start_over()}",
        ) from error
    # With its own settings: after a change of --dtype, or on a node without a compiler, the checkpoint is
    # from another kind of AdamW.
    own = {"param_groups": state.optimizer.state_dict()["param_groups"]}
    state.optimizer.load_state_dict({**tensors["optimizer"], **own})
    # A rank that was not there when an elastic run saved it keeps its own.
    if ranks.rank < len(tensors["random"]):
        set_random_state(tensors["random"][ranks.rank])
