"""A cluster made once, for the many tests that begin with one. Copying it takes no time."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.local_files import home

if TYPE_CHECKING:
    from tests.harness.simulated_cloud import SimulatedCloud


@dataclass(frozen=True)
class PreparedCluster:
    """EC2's state, the machines, this machine's files, and what was recorded so far."""

    regions: bytes
    containers: tuple[dict[str, Any], dict[str, Any]]
    records: tuple[list[Any], list[str], list[str], list[str]]
    folder: Path
    now: float


def save(world: SimulatedCloud, folder: Path) -> PreparedCluster:
    """Save a copy of everything in a folder."""
    for name, place in _places(world).items():
        shutil.copytree(place, folder / name)
    return PreparedCluster(
        regions=pickle.dumps(dict(world.fake.application._regions)),
        containers=(dict(world.engine.specs), dict(world.engine.state)),
        records=tuple(list(record) for record in _records(world)),  # type: ignore[arg-type]
        folder=folder,
        now=world.clock.now,
    )


def restore(world: SimulatedCloud, prepared: PreparedCluster) -> None:
    """Continue from a copy in an empty cloud."""
    application = world.fake.application
    world.clock.now = prepared.now
    for name, place in _places(world).items():
        shutil.copytree(prepared.folder / name, place, dirs_exist_ok=True)
    world.engine.specs, world.engine.state = (dict(part) for part in prepared.containers)
    with application.lock:
        for region, backend in pickle.loads(prepared.regions).items():
            application._regions[region] = backend
            backend.resume(application.runtime, suspended=False)
    for record, before in zip(_records(world), prepared.records, strict=True):
        record[:] = before


def _places(world: SimulatedCloud) -> dict[str, Path]:
    places = {"machines": world.machines.root, "images": world.fake.folder.images, "home": home()}
    for place in places.values():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return places


def _records(world: SimulatedCloud) -> tuple[list[Any], ...]:
    return world.recorder.calls, world.steps.done, world.progress.phases, world.progress.notes
