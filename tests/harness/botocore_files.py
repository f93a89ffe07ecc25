"""What botocore and moto read and compute again for each session and each answer: here it is kept."""

from __future__ import annotations

import functools
from typing import Any

import moto.core.responses
from botocore.loaders import JSONFileLoader
from moto.core.serialize import XFormedAttributePicker

_FILES: dict[str, Any] = {}
_KEYS: dict[Any, tuple[str, ...]] = {}
_read = JSONFileLoader.load_file
_find_keys = XFormedAttributePicker.get_possible_keys


def read_once() -> None:
    """Let all sessions of this process, and of its forks, share what one of them has read."""
    setattr(JSONFileLoader, "load_file", _read_once)  # noqa: B010
    responses: Any = moto.core.responses
    responses.method_names_from_class = functools.cache(responses.method_names_from_class)
    XFormedAttributePicker.get_possible_keys = _find_keys_once


def _read_once(loader: JSONFileLoader, file_path: str) -> Any:
    if file_path not in _FILES:
        _FILES[file_path] = _read(loader, file_path)
    return _FILES[file_path]


def _find_keys_once(picker: Any, context: Any) -> tuple[str, ...]:
    """The names that an element of an answer may have in moto's object, of which only the class counts."""
    shape = context.shape
    parent, providers = getattr(shape, "parent", None), tuple(picker.alias_providers)
    place = (type(context.obj), context.key, shape, parent, providers)
    if place not in _KEYS:
        _KEYS[place] = tuple(_find_keys(picker, context))
    return _KEYS[place]
