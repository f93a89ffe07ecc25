"""botocore's descriptions of AWS's services: large files, which each of its sessions parses anew."""

from __future__ import annotations

from typing import Any

from botocore.loaders import JSONFileLoader

_KNOWN: dict[str, Any] = {}
_read = JSONFileLoader.load_file


def read_once() -> None:
    """Let all sessions of this process, and of its forks, share what one of them has read."""
    setattr(JSONFileLoader, "load_file", _read_once)  # noqa: B010


def _read_once(loader: JSONFileLoader, file_path: str) -> Any:
    if file_path not in _KNOWN:
        _KNOWN[file_path] = _read(loader, file_path)
    return _KNOWN[file_path]
