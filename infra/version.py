"""The version, with the commit of a source tree that is not a release."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_RELEASE = "0.1.0"
_ROOT = Path(__file__).resolve().parent.parent


@cache
def read_version() -> str:
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
