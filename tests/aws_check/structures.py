"""The structure of answers: which elements each operation has shown, and the values of its enums."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from botocore.model import OperationModel
from botocore.parsers import create_parser

from tests.harness.shapes import check_answer, protocol_of

Paths = dict[str, set[str]]
_QUOTED = re.compile(r'"(\w+)"')
_ROOT = Path(__file__).parents[2]


class Structures:
    """A :class:`tests.harness.contract.Observer` that remembers structures, and no other values."""

    def __init__(self) -> None:
        self.seen: dict[str, Paths] = {}
        """By operation: each path, with the values there if they are an enum's."""
        self.unmodeled: dict[str, set[str]] = {}
        """By operation: what botocore's model lacks."""

    def on_request(self, operation: OperationModel, parameters: Any) -> None:
        return None

    def on_answer(self, operation: OperationModel, status: int, body: bytes) -> None:
        name = f"{operation.service_model.service_name}:{operation.name}"
        found = set(check_answer(operation, status, body))
        if found:
            self.unmodeled.setdefault(name, set()).update(found)
        if status >= 300 or operation.output_shape is None:
            return
        answer = {"body": body, "headers": {}, "status_code": status, "context": {}}
        parsed = create_parser(protocol_of(operation)).parse(answer, operation.output_shape)
        parsed.pop("ResponseMetadata", None)
        paths = self.seen.setdefault(name, {})
        for path, value in _walk(operation.output_shape, parsed, ""):
            paths.setdefault(path, set()).update({value} if value else ())


def _walk(shape: Any, value: Any, path: str) -> Iterator[tuple[str, str]]:
    if shape.type_name == "structure":
        for name, inner in value.items():
            # Unknown members of a union are no members.
            if name in shape.members:
                yield from _walk(shape.members[name], inner, f"{path}.{name}" if path else name)
    elif shape.type_name == "list":
        for item in value:
            yield from _walk(shape.member, item, f"{path}[]")
    else:
        yield path, str(value) if shape.metadata.get("enum") else ""


def compare(ours: Paths, theirs: Paths) -> tuple[list[str], list[str]]:
    """Return the paths that only the embedded cloud shows, and those that only AWS shows.

    What is in a list that is empty on one side can't be compared.
    """
    return _only_in(ours, theirs), _only_in(theirs, ours)


def _only_in(some: Paths, others: Paths) -> list[str]:
    lists = {path[: i + 2] for path in others for i in range(len(path)) if path[i : i + 2] == "[]"}
    return sorted(p for p in some if p not in others and _list_of(p) in {"", *lists})


def _list_of(path: str) -> str:
    """Return the path of the innermost list around an element."""
    inner, found, _ = path.rpartition("[]")
    return inner + found


def is_read(path: str) -> bool:
    """Return whether the product's code, or boto3's paginators, name this element."""
    name = path.replace("[]", "").rpartition(".")[2]
    return name == "NextToken" or name in _names_in_code()


@functools.cache
def _names_in_code() -> frozenset[str]:
    """Return all words in quotes in the product without the embedded cloud."""
    paths = [p for folder in ("infra", "cluster") for p in (_ROOT / folder).rglob("*.py")]
    texts = (path.read_text() for path in paths if "local" not in path.relative_to(_ROOT).parts)
    return frozenset(word for text in texts for word in _QUOTED.findall(text))


def new_values(ours: Paths, theirs: Paths) -> Mapping[str, list[str]]:
    """Return the enum values that only AWS shows, at paths that both show."""
    both = {path: sorted(theirs[path] - ours[path]) for path in ours.keys() & theirs.keys()}
    return {path: values for path, values in both.items() if values}
