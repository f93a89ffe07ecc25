"""A run's state on rank 0's disk, from which ``--resume`` goes on as if nothing had happened.

checkpoints/step-000123/
    state.pt         weights, the optimizer's state, every rank's random state
    checkpoint.json  :class:`Checkpoint`

A folder is written beside its place under a name that nobody takes for a checkpoint, brought to the
disk, and then renamed, so one that is there is whole. Only rank 0 has it: where others take over
after a machine was replaced, they get everything from rank 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..runtime.errors import CheckpointError, first_line
from ..runtime.output import CHECKPOINTS
from ..runtime.ranks import Ranks
from .features import Feature
from .options import ANY_RUN, MAY_CHANGE, TrainOptions, flag
from .state import (
    State,
    TrainingProgress,
    random_state,
    set_random_state,
    share_tensors,
)

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial"
EVERY_SECONDS = 600.0
"""So much training a machine that dies costs at most, on average half of it."""
MOST_SHARE = 0.02
"""Writing takes at most this part of the time, however slow the disk is."""
WORTH_SECONDS = 60.0
"""After the last step a checkpoint is written if at least so much is not in one yet: the evaluation,
too, may be interrupted."""


class RunIdentity(NamedTuple):
    """What makes a run this very one: with anything of it changed, it can't be continued."""

    world_size: int
    dtype: str
    features: str
    """A digest of the training features, see :func:`digest`; on rank 0 alone."""
    options: dict[str, Any]
    ground: Mapping[str, str]
    """What results depend on to the last bit, and what may yet change: it is told, not refused."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its tensors."""

    identity: RunIdentity
    progress: TrainingProgress


@dataclass
class CheckpointTimer:
    """``every`` is in steps; ``None`` means by time. Only rank 0's clock counts."""

    every: int | None
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None
    _cost: float = 0.0

    def by_step(self, step: int, *, last: bool) -> bool:
        """A checkpoint is due after this step; the same on every rank."""
        return self.every is not None and (last or step % self.every == 0)

    def by_time(self, *, last: bool) -> bool:
        """A checkpoint is due now, by this rank's clock."""
        now = self.clock()
        self._since = now if self._since is None else self._since
        if self.every is not None:
            return False
        least = self._cost / MOST_SHARE
        return now - self._since >= max(WORTH_SECONDS if last else EVERY_SECONDS, least)

    def saved(self, seconds: float) -> None:
        """A checkpoint was written, and took so long."""
        self._since, self._cost = self.clock(), seconds


def identify(
    options: TrainOptions,
    ranks: Ranks,
    dtype: str,
    features: Sequence[Feature],
    ground: Mapping[str, str],
) -> RunIdentity:
    """This run's identity."""
    known = {k: v for k, v in asdict(options).items() if k not in ANY_RUN}
    # Rank 0 alone compares; of 88,000 features it is work of a second.
    return RunIdentity(ranks.size, dtype, digest(features) if ranks.first else "", known, ground)


def digest(features: Sequence[Feature]) -> str:
    """The same for the same features in the same order: the data may change behind its path."""
    found = blake2b(digest_size=16)
    for feature in features:
        found.update(feature.inputs["input_ids"].tobytes())
        found.update(f"{feature.start} {feature.end};".encode())
    return found.hexdigest()


def save_checkpoint(output: Path, checkpoint: Checkpoint, state: State, ranks: Ranks) -> str:
    """Write a checkpoint of all ranks and return its name, on every rank, when it is on the disk.

    Raises :class:`CheckpointError` on every rank where the disk does not take it.
    """
    randoms = ranks.gather(random_state())
    target, trouble = output / CHECKPOINTS / f"step-{checkpoint.progress.step:06d}", ""
    if ranks.first:
        try:
            _write(target, checkpoint, state, randoms)
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            shutil.rmtree(_beside(target), ignore_errors=True)
            trouble = f"checkpoint {target} can't be written: {first_line(error)}"
    trouble = ranks.share(trouble)
    if trouble:
        raise CheckpointError(
            trouble,
            hint="is there room? --keep-checkpoints 1 needs less; those written before are kept",
        )
    return target.name


def _beside(target: Path) -> Path:
    """Where a checkpoint is before it is whole, and after it is no longer wanted."""
    return target.with_name(target.name + _PARTIAL)


def _write(target: Path, checkpoint: Checkpoint, state: State, randoms: list[Any]) -> None:
    partial = _beside(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "random": randoms,
    }
    with (partial / "state.pt").open("wb") as file:
        torch.save(tensors, file)
        _to_disk(file.fileno())
    with (partial / "checkpoint.json").open("w", encoding="utf-8") as text:
        content = {
            "identity": checkpoint.identity._asdict(),
            "progress": asdict(checkpoint.progress),
        }
        json.dump(content, text, indent=1)
        text.flush()
        _to_disk(text.fileno())
    _folder_to_disk(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _folder_to_disk(target.parent)


def _to_disk(descriptor: int) -> None:
    os.fsync(descriptor)


def _folder_to_disk(folder: Path) -> None:
    """Names are a folder's content, and reach the disk with it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _to_disk(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    found = [path for path in (output / CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def prune(output: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and what an interrupted run left half done."""
    for path in list_checkpoints(output)[:-keep]:
        # Out of sight first: a removal that is interrupted must not leave half a checkpoint.
        gone = path.rename(_beside(path))
        shutil.rmtree(gone, ignore_errors=True)
    for path in (output / CHECKPOINTS).glob(f"*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint's description; raises :class:`CheckpointError` for one that can't be read."""
    try:
        content = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        identity = RunIdentity(**{"ground": {}, **content["identity"]})
        return Checkpoint(identity, TrainingProgress.from_dict(content["progress"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} can't be read: {first_line(error)}",
        hint="remove that folder: the checkpoint before it is then taken",
    )


def require_same(saved: RunIdentity, now: RunIdentity) -> list[str]:
    """Raises :class:`CheckpointError`, naming what differs, where a run can't be continued.

    Returns what was changed and may be, such as ``--learning-rate 1e-05 (it was 5e-05)``.
    """
    if saved.world_size != now.world_size:
        raise CheckpointError(
            f"the checkpoint is of {saved.world_size} ranks, and these are {now.world_size}",
            hint=f"resume with {saved.world_size} ranks, or begin anew without --resume",
        )
    changed = {
        name: f"{flag(name)} {now.options.get(name)} (it was {saved.options.get(name)})"
        for name in sorted({*saved.options, *now.options})
        if saved.options.get(name) != now.options.get(name)
    }
    if refused := [told for name, told in changed.items() if name not in MAY_CHANGE]:
        raise CheckpointError(
            f"a run can't be resumed with other options: {', '.join(refused)}",
            hint="resume with the options that it began with, or begin anew without --resume",
        )
    if saved.features != now.features:
        raise CheckpointError(
            "the training data is not what the run began with",
            hint="give it the same data, or begin anew without --resume",
        )
    told = list(changed.values())
    if saved.dtype != now.dtype:
        told.append(f"arithmetic in {now.dtype} (it was {saved.dtype})")
    both = saved.ground.keys() & now.ground.keys()
    changes = sorted(name for name in both if saved.ground[name] != now.ground[name])
    told += [f"{name} {now.ground[name]} (it was {saved.ground[name]})" for name in changes]
    return told


def load_state(folder: Path | None, state: State, ranks: Ranks) -> None:
    """Put a checkpoint that rank 0 has, in ``folder``, into every rank's model and optimizer.

    The ranks' random states follow. Raises :class:`CheckpointError` on rank 0.
    """
    read = None if folder is None else _read_state(folder)
    tensors = share_tensors(read, ranks)
    state.model.load_state_dict(tensors["model"])
    state.optimizer.load_state_dict(tensors["optimizer"])
    set_random_state(tensors["random"][ranks.rank])


def _read_state(folder: Path) -> Any:
    try:
        return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    # Whatever unpickling what is no checkpoint may come to.
    except Exception as error:
        raise _unreadable(folder, error) from error
