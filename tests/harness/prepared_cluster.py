"""A cluster that was made once, for the many tests that begin with one: a copy takes no time."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.local_files import home

if TYPE_CHECKING:
    from tests.harness.simulated_cloud import ParkCloud


@dataclass(frozen=True)
class Made:
    """EC2's state, the machines, this machine's files, and what was done for it until then."""

    regions: bytes
    containers: tuple[dict[str, Any], dict[str, Any]]
    told: tuple[list[Any], list[str], list[str], list[str]]
    folder: Path
    now: float


def keep(world: ParkCloud, folder: Path) -> Made:
    """Keep a copy of everything in a folder."""
    for name, place in _places(world).items():
        shutil.copytree(place, folder / name)
    return Made(
        regions=pickle.dumps(dict(world.fake.application._regions)),
        containers=(dict(world.engine.specs), dict(world.engine.state)),
        told=tuple(list(told) for told in _told(world)),  # type: ignore[arg-type]
        folder=folder,
        now=world.clock.now,
    )


def take_up(world: ParkCloud, made: Made) -> None:
    """Have an empty cloud go on from a copy."""
    application = world.fake.application
    world.clock.now = made.now
    for name, place in _places(world).items():
        shutil.copytree(made.folder / name, place, dirs_exist_ok=True)
    world.engine.specs, world.engine.state = (dict(part) for part in made.containers)
    with application.lock:
        for region, backend in pickle.loads(made.regions).items():
            application._regions[region] = backend
            backend.resume(
                application._nodes, application._clock, application.faults, suspended=False
            )
    for told, before in zip(_told(world), made.told, strict=True):
        told[:] = before


def _places(world: ParkCloud) -> dict[str, Path]:
    places = {"park": world.park.root, "images": world.fake.folder.images, "home": home()}
    for place in places.values():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return places


def _told(world: ParkCloud) -> tuple[list[Any], ...]:
    return world.recorder.calls, world.steps.done, world.notes.phases, world.notes.told
