"""YAML with comments: the dicts of a manifest as text, and the reason for each choice beside it. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

_MARK = "__comment_%s__"
# As a key of a mapping, and as an item of a list.
_LINE = re.compile(r"^( *)(?:__comment_(\w+)__: ''|- __comment_(\w+)__)\n", re.MULTILINE)
_WIDTH = 100


class _Dumper(yaml.SafeDumper):
    """Repeats what appears twice, and writes a text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def render_yaml(document: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return the document as YAML. ``comments`` are by key, or by ``name`` in a list; each appears once,
    above the first place that it is about."""
    left = dict(enumerate(comments.values()))
    numbers = {name: str(number) for number, name in enumerate(comments)}
    text = yaml.dump(
        _mark(document, numbers),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        width=_WIDTH,
    )

    def comment(found: re.Match[str]) -> str:
        indent = f"{found[1]}# "
        return (
            textwrap.fill(
                left[int(found[2] or found[3])],
                _WIDTH,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            + "\n"
        )

    return _LINE.sub(comment, text)


def _mark(value: Any, numbers: dict[str, str]) -> Any:
    """Return a copy with a mark before everything that has a comment; uses up ``numbers``."""
    if isinstance(value, Mapping):
        marked: dict[str, Any] = {}
        for key, each in value.items():
            if number := numbers.pop(key, None):
                marked[_MARK % number] = ""
            marked[key] = _mark(each, numbers)
        return marked
    if isinstance(value, list):
        items: list[Any] = []
        for item in value:
            name = item.get("name") if isinstance(item, Mapping) else None
            if number := numbers.pop(str(name), None):
                items.append(_MARK % number)
            items.append(_mark(item, numbers))
        return items
    return value
