"""Contract test: every request and every answer in a test is compared with AWS's service models.

All of boto3's calls pass through :mod:`botocore.client` and :mod:`botocore.endpoint`, on HTTP or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol

import botocore.client
import botocore.endpoint
import pytest
from botocore.model import OperationModel

from tests.harness.shapes import check_answer, check_request

# What differs between answers that are alike: ids, numbers, and times.
_VARIES = re.compile(rb"[0-9a-f]*\d[0-9a-f-]*")

KNOWN_DEVIATIONS = {
    "DescribeInstanceTypes answer *: 'metal-compatibility' is not in its enum": "moto has it from AWS; "
    "botocore's model is older, and the product does not read it",
    "ListSchedules answer Schedules*: unknown member": "moto lists whole schedules, AWS their summaries; "
    "botocore drops the rest, so the product can't read it",
}
"""Patterns of what the embedded cloud may answer although the model lacks it, with reasons."""


class Contract:
    """Collects violations; answers that differ only in ids and numbers are looked at once.

    If ``strict``, a violation ends the call instead: :class:`AssertionError`.
    """

    def __init__(self, known: Iterable[str] = (), *, strict: bool = False) -> None:
        self.violations: list[str] = []
        """Since the last :meth:`drain`."""
        self._known = tuple(known)
        self._strict = strict
        self._checked: dict[Any, tuple[str, ...]] = {}

    def on_request(self, operation: OperationModel, parameters: Any) -> None:
        key = (operation.name, str(parameters))
        self._record(operation, "request", key, lambda: check_request(operation, parameters))

    def on_answer(self, operation: OperationModel, status: int, body: bytes) -> None:
        key = (operation.name, status, hash(_VARIES.sub(b"", body)))
        self._record(operation, "answer", key, lambda: check_answer(operation, status, body))

    def _record(
        self, operation: OperationModel, side: str, key: Any, check: Callable[[], Any]
    ) -> None:
        if key not in self._checked:
            prefix = f"{operation.name} {side} "
            found = dict.fromkeys(prefix + text for text in check())
            self._checked[key] = tuple(text for text in found if not self._knows(text))
        # A violation counts each time: it fails every test that causes it.
        self.violations += self._checked[key]
        assert not (self._strict and self.violations), self.violations

    def _knows(self, text: str) -> bool:
        return any(fnmatchcase(text, pattern) for pattern in self._known)

    def drain(self) -> list[str]:
        found, self.violations = sorted(set(self.violations)), []
        return found


def require_announced(violations: Sequence[str], patterns: Sequence[str]) -> None:
    """Raise :class:`AssertionError` unless each violation matches a pattern, and each pattern one."""
    silent = [text for text in violations if not any(fnmatchcase(text, p) for p in patterns)]
    assert not silent, "not in AWS's service model: " + "; ".join(silent)
    unused = [p for p in patterns if not any(fnmatchcase(text, p) for text in violations)]
    assert not unused, f"announced, but kept: {'; '.join(unused)}"


class Observer(Protocol):
    """Sees the calls of this process."""

    def on_request(self, operation: OperationModel, parameters: Any) -> None:
        """Receive a request's parameters, once however often it is sent."""

    def on_answer(self, operation: OperationModel, status: int, body: bytes) -> None:
        """Receive an answer's body."""


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Show an observer all calls of this process."""
    endpoint: Any = botocore.endpoint
    client: Any = botocore.client.BaseClient
    convert, read = client._convert_to_request_dict, endpoint.convert_to_response_dict

    def watched_convert(self: Any, **given: Any) -> Any:
        request = convert(self, **given)
        observer.on_request(given["operation_model"], given["api_params"])
        return request

    def watched_read(response: Any, operation: OperationModel) -> Any:
        found = read(response, operation)
        if isinstance(found["body"], bytes):
            observer.on_answer(operation, found["status_code"], found["body"])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_convert_to_request_dict", watched_convert)
        patch.setattr(endpoint, "convert_to_response_dict", watched_read)
        yield
