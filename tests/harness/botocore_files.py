"""What botocore, moto, and Flask read and compute again for each session and each answer: here it is kept."""

from __future__ import annotations

import functools
from typing import Any
from xml.sax.saxutils import escape

import moto.core.responses
from botocore.loaders import JSONFileLoader, Loader
from moto.core.request import normalize_request
from moto.core.serialize import EC2Serializer, XFormedAttributePicker

import infra.local.api.application
from infra.local.api.requests import Reply

_FILES: dict[str, Any] = {}
_LOADED: dict[Any, Any] = {}
_KEYS: dict[Any, tuple[str, ...]] = {}
_read = JSONFileLoader.load_file
_find_keys = XFormedAttributePicker.get_possible_keys
_call_flask = infra.local.api.application._call_wsgi


def read_once() -> None:
    """Let all sessions of this process, and of its forks, share what one of them has read."""
    setattr(JSONFileLoader, "load_file", _read_once)  # noqa: B010
    setattr(Loader, "_cache", property(lambda _: _LOADED, lambda *_: None))  # noqa: B010
    setattr(infra.local.api.application, "_call_wsgi", _call_moto)  # noqa: B010
    responses: Any = moto.core.responses
    responses.method_names_from_class = functools.cache(responses.method_names_from_class)
    XFormedAttributePicker.get_possible_keys = _find_keys_once
    setattr(EC2Serializer, "_serialize_body", _write_xml)  # noqa: B010


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


def _write_xml(_: Any, body: dict[str, Any]) -> str:
    """Write an answer of EC2, without attributes but the namespace; xmltodict is slow."""
    parts = ['<?xml version="1.0" encoding="utf-8"?>\n']

    def write(name: str, value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                write(name, each)
        elif isinstance(value, dict):
            parts.append(f"<{name}")
            parts.extend(f' {key[1:]}="{text}"' for key, text in value.items() if key[0] == "@")
            parts.append(">")
            for key, below in value.items():
                if key[0] != "@":
                    write(key, below)
            parts.append(f"</{name}>")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"<{name}>{'' if value is None else escape(text)}</{name}>")

    for name, value in body.items():
        write(name, value)
    return "".join(parts)


def _call_moto(application: Any, environ: dict[str, Any]) -> Reply:
    """Call moto's only function for a service, such as EC2's, without Flask, which is half of the time."""
    callback = _only_callback(application)
    if callback is None:
        return _call_flask(application, environ)
    request = normalize_request(application.request_class(environ))
    status, headers, body = callback(request, request.raw_url, dict(request.headers))
    text = body.encode() if isinstance(body, str) else body
    return Reply(f"{status} ", tuple((name, str(value)) for name, value in headers.items()), text)


@functools.cache
def _only_callback(application: Any) -> Any:
    views = getattr(application, "view_functions", {}).values()
    found = {view.callback for view in views if hasattr(view, "callback")}
    return found.pop() if len(found) == 1 else None
