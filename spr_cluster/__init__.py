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
_RELEASE = "0.1.0"
_ROOT = Path(__file__).resolve().parent.parent
_ON_NODE = _ROOT.match("worker/program/imports")
if _ON_NODE:
    __path__ = [str(_ROOT.parent.parent)]


def _read_version() -> str:
    """Return the version, in a source tree with its commit: ``0.1.0+gabcdef1.dirty``."""
    import subprocess  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415

    if not (_ROOT / "pyproject.toml").exists():
        try:
            return metadata.version("spr-cluster")
        except metadata.PackageNotFoundError:
            return _RELEASE
    # With the folder's name: a tree without git may be inside another repository.
    git = "git --git-dir=.git describe --always --tags --long --abbrev=7 --dirty=.dirty"
    argv = [*git.split(), f"--match=v{_RELEASE}"]
    try:
        said = subprocess.check_output(argv, cwd=_ROOT, stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):
        return _RELEASE
    commit = said.strip().rpartition("-g")[2]
    is_release = said.startswith(f"v{_RELEASE}-0-") and not commit.endswith("dirty")
    return _RELEASE if is_release else f"{_RELEASE}+g{commit}"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _read_version()
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
