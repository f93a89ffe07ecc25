"""The folder on this machine that receives a job's YAML and the files of its image."""

from __future__ import annotations

import shutil
from pathlib import Path

from infra.errors import UsageError
from jobs.kubernetes.render import Rendered
from jobs.train.request import check_writable, expand_home

_OURS = ("Dockerfile", "requirements.txt", "job.yaml", "code")
_MAYBE = ("claim.yaml",)


def check_build_folder(name: str) -> Path:
    """Return the folder. Raises :class:`UsageError` if it can't be written, or holds other files."""
    folder = expand_home(name)
    check_writable(folder, "--output")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found and not set(_OURS) <= found:
        raise UsageError(
            f"--output {folder}: it contains other files",
            hint="give a folder that is new, or that `k8s render` wrote",
        )
    return folder


def write_build_folder(rendered: Rendered, folder: Path) -> None:
    """Write everything; of an earlier rendering, nothing stays that would be out of date."""
    shutil.rmtree(folder / "code", ignore_errors=True)
    for name in _MAYBE:
        (folder / name).unlink(missing_ok=True)
    for name, source in rendered.build.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source if isinstance(source, bytes) else source.read_bytes())
    for name, text in rendered.yaml_files().items():
        (folder / name).write_text(text)
