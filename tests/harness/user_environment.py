"""The environment that the README makes: the built wheel with the extra `[local]`, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

_ROOT = Path(__file__).parents[2]
_VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    _run(find_uv_bin(), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(_ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(
    wheel: Path, folder: Path, python: str = sys.executable, extra: str = "[local]"
) -> Path:
    """Install the wheel for a user; return the folder of the environment's programs."""
    _run(find_uv_bin(), "venv", "--quiet", "--clear", "--python", python, str(folder))
    into = ("--python", str(folder / "bin/python"))
    _run(find_uv_bin(), "pip", "install", "--quiet", *into, f"{wheel}{extra}")
    return folder / "bin"


def find_pythons() -> list[str]:
    """Return one interpreter of each supported version on this machine, the running one included."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in _VERSIONS:
        paths = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for path in (*paths, shutil.which(f"python{version}") or "/none"):
            # A shim of pyenv can exist for a version that is not chosen.
            if is_python(path):
                found.setdefault(version, path)
    return [found[version] for version in sorted(found)]


def is_python(path: str) -> bool:
    """Return whether a program is a Python that runs here."""
    try:
        return subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def without_checkout() -> dict[str, str]:
    """Return this environment's variables for a user's commands.

    A checkout on PYTHONPATH would hide what the wheel lacks, and no command should compile its modules again.
    """
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _run(*argv: str) -> None:
    """Run uv with its cache alone; if that has not all packages yet, with the network."""
    for offline in ("1", "0"):
        environ = {**without_checkout(), "UV_OFFLINE": offline}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=environ)
        if done.returncode == 0:
            return
    raise AssertionError(f"{argv}\n{done.stdout}\n{done.stderr}")
