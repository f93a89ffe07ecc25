"""A cluster made once, for the many tests that begin with one. Copying it takes no time."""

from __future__ import annotations

import itertools
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moto.iam.models import iam_backends

from cluster.local_files import home

if TYPE_CHECKING:
    from tests.harness.simulated_cloud import SimulatedCloud


_FOLDER = tempfile.TemporaryDirectory(prefix="prepared-")
_PREPARED: dict[str, PreparedCluster] = {}


@dataclass(frozen=True)
class PreparedCluster:
    """EC2's state, the machines, this machine's files, and what was recorded so far."""

    regions: bytes
    containers: tuple[dict[str, Any], dict[str, Any]]
    records: tuple[list[Any], list[str], list[str], list[str]]
    folder: Path
    home: Path
    now: float
    result: Any


def begin_with(world: SimulatedCloud, key: str, make: Callable[[], Any]) -> Any:
    """Make a cluster in an empty cloud, once for all tests of this process; return what that returned."""
    if key in _PREPARED:
        _restore(world, _PREPARED[key])
    else:
        _PREPARED[key] = _save(world, make())
    return _PREPARED[key].result


def _save(world: SimulatedCloud, result: Any) -> PreparedCluster:
    """Save a copy of everything. Raises :class:`AssertionError` for a cluster with roles or schedules."""
    assert not any(role for account in iam_backends.values() for role in account["aws"].roles)
    folder = Path(_FOLDER.name, str(len(_PREPARED)))
    for name, place in _places(world).items():
        shutil.copytree(place, folder / name)
    return PreparedCluster(
        regions=pickle.dumps(dict(world.fake.application._regions)),
        containers=(dict(world.engine.specs), dict(world.engine.state)),
        records=tuple(list(record) for record in _records(world)),  # type: ignore[arg-type]
        folder=folder,
        home=home(),
        now=world.clock.now,
        result=result,
    )


def _restore(world: SimulatedCloud, prepared: PreparedCluster) -> None:
    """Continue from a copy in an empty cloud."""
    application = world.fake.application
    world.clock.now = prepared.now
    for name, place in _places(world).items():
        shutil.copytree(prepared.folder / name, place, dirs_exist_ok=True)
    for config in home().rglob("ssh_*"):
        config.write_text(config.read_text().replace(str(prepared.home), str(home())))
    world.engine._pids = itertools.count(10_000 + len(_PREPARED))
    world.engine.specs, world.engine.state = (dict(part) for part in prepared.containers)
    with application.lock:
        for region, backend in pickle.loads(prepared.regions).items():
            application._regions[region] = backend
            backend.resume(application.runtime, suspended=())
    for record, before in zip(_records(world), prepared.records, strict=True):
        record[:] = before


def _places(world: SimulatedCloud) -> dict[str, Path]:
    places = {"machines": world.machines.root, "images": world.fake.folder.images, "home": home()}
    for place in places.values():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return places


def _records(world: SimulatedCloud) -> tuple[list[Any], ...]:
    return world.recorder.calls, world.steps.done, world.progress.phases, world.progress.notes
