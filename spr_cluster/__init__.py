"""The public names, each imported when it is used. On nodes, inside a job's code, only ``speed_up`` works."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.api import Cluster, Job, JobError, Run, SprError, Training, UsageError, study
    from jobs.worker.fast.speed_up import speed_up

__all__ = ["Cluster", "Job", "JobError", "Run", "SprError", "Training", "UsageError"]
__all__ += ["speed_up", "study"]
__version__: str
_ROOT = Path(__file__).resolve().parent.parent
_ON_NODE = _ROOT.match("worker/program/imports")
if _ON_NODE:
    __path__ = [str(_ROOT.parent.parent)]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__" and not _ON_NODE:
        value: Any = import_module("infra.version").read_version()
    elif name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif _ON_NODE and name != "speed_up":
        raise ImportError(f"{name} needs spr-cluster, which is not installed on nodes")
    else:
        home = f"{__name__ if _ON_NODE else 'jobs.worker'}.fast.speed_up"
        try:
            value = getattr(import_module(home if name == "speed_up" else "jobs.api"), name)
        except ModuleNotFoundError as error:
            text = f"{name} needs {error.name}: pip install 'spr-cluster[job]'"
            raise ImportError(text) from None
    return globals().setdefault(name, value)
