"""A rank's view of a run: its options, the other ranks, their hardware, and the phases."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from .events import Events
from .pinning import RankPlacement
from .precision import AMX_FLAGS, Precision, autocast
from .ranks import Ranks

_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "ipex": "intel_extension_for_pytorch",
    "oneccl": "oneccl_bind_pt",
}

Options = TypeVar("Options", covariant=True)


@dataclass(frozen=True)
class RankFacts:
    """One process: ``cpus`` is the number of CPUs it may use, ``threads`` torch's number of threads.

    ``planned`` is the launcher's plan, if there is one, ``found`` the actual placement.
    """

    rank: int
    hostname: str
    pid: int
    threads: int
    cpus: int
    planned: RankPlacement | None
    found: RankPlacement


class Hardware(NamedTuple):
    """A rank's report to the others about itself."""

    facts: RankFacts
    flags: frozenset[str]


@dataclass
class Phases:
    """Duration of each phase of a run, in seconds."""

    _begin: float = field(default_factory=time.perf_counter)
    _seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float, *, interrupted: bool = False) -> None:
        """Add a finished phase, or the time that an ``interrupted`` run spent on it."""
        self._seconds[name] = round(self._seconds.get(name, 0.0) + seconds, 3)
        if interrupted:
            self._begin -= seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every finished phase, and the whole run's as ``total``."""
        return {**self._seconds, "total": round(time.perf_counter() - self._begin, 3)}


@dataclass(frozen=True)
class RankContext(Generic[Options]):
    """A run as one rank sees it."""

    options: Options
    ranks: Ranks
    events: Events
    precision: Precision
    hardware: Sequence[Hardware] = ()
    """All ranks' reports, in rank order."""
    output: Path = Path("output")
    phases: Phases = field(default_factory=Phases)

    @property
    def hosts(self) -> list[str]:
        """The ranks' host names, in rank order."""
        return [each.facts.hostname for each in self.hardware]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce and time a phase: a context manager."""
        self.events.emit("phase", name=name)
        begin = time.perf_counter()
        yield
        self.phases.add(name, time.perf_counter() - begin)

    def autocast(self) -> AbstractContextManager[Any]:
        """Use bf16 inside, if that is the run's precision: a context manager."""
        return autocast(self.precision.dtype)

    def facts(self) -> dict[str, Any]:
        """Return the part common to all results: ranks, backend, precision, versions."""
        return {
            "seconds": self.phases.seconds(),
            "world_size": self.ranks.size,
            "ranks": [asdict(each.facts) for each in self.hardware],
            "backend": self.ranks.backend,
            "backend_reason": self.ranks.backend_reason,
            "dtype": self.precision.name,
            "dtype_reason": self.precision.reason,
            "amx": all(each.flags >= AMX_FLAGS for each in self.hardware),
            "versions": package_versions(),
        }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found
