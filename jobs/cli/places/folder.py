"""The folder of ``--output``: checked before it is written, and written without touching other files."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from infra.errors import UsageError
from jobs.train.request import check_writable, expand_home

Result = tuple[str, dict[str, object]]
"""What a command prints, as text and as JSON."""


def check_output_folder(name: str, ours: Collection[str], writer: str) -> Path:
    """Return the folder. Raises :class:`UsageError` if it can't be written, or holds other files.

    A folder that contains ``ours`` was written by the place ``writer``.
    """
    folder = expand_home(name)
    check_writable(folder, "--output")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found and not set(ours) <= found:
        raise UsageError(
            f"--output {folder}: it contains other files",
            hint=f"give a folder that is new, or that `--to {writer}` wrote",
        )
    return folder


def write_files(files: Mapping[str, Path | bytes], folder: Path) -> None:
    """Write contents, and copies of files and folders, by name into a folder; ``code`` is recreated.

    Before anything changes, raises :class:`UsageError` for a folder that would be copied into itself and
    for a source that would be replaced.
    """
    for name, source in files.items():
        if isinstance(source, Path):
            _check_source(source, folder, folder / name)
    shutil.rmtree(folder / "code", ignore_errors=True)
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            target.write_bytes(source)
        elif not (target.exists() and source.samefile(target)):
            _copy(source, target)


def _check_source(source: Path, folder: Path, target: Path) -> None:
    where, whole = source.resolve(), folder.resolve()
    if whole.is_relative_to(where):
        raise UsageError(f"--output {folder}: it is in {source}, which is copied into it")
    if where.is_relative_to(whole) and where != target.resolve():
        raise UsageError(
            f"--output {folder}: {source} is in it, and what is in it is replaced",
            hint="give another folder, or move that file or folder out of it first",
        )


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
