"""IAM policies, evaluated as IAM does it.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.errors import UsageError
from infra.files import parse_object

_VARIABLE = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True)
class Request:
    """An action on a resource that IAM allows or denies. An API call can need several.

    ``context`` holds the condition keys that AWS provides for it.
    """

    action: str
    resource: str
    context: Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Policy:
    """The statements of a policy document."""

    statements: Sequence[Mapping[str, Any]]

    def allows(self, request: Request) -> bool:
        """Return whether some statement allows the request and none denies it."""
        effects = {s["Effect"] for s in self.statements if _applies(s, request)}
        return effects == {"Allow"}


def parse_policy(text: str, source: str) -> Policy:
    """Parse a policy document. Raises :class:`UsageError` for another document."""
    found = parse_object(text, source).get("Statement")
    statements = [found] if isinstance(found, dict) else found
    if not isinstance(statements, list) or not all(isinstance(s, dict) for s in statements):
        raise UsageError(f"{source}: expected an object with a Statement and its Effect")
    return Policy(statements)


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    """Return whether a statement matches a request, including its conditions."""
    if not _names(tuple(_listed(statement["Action"])), request.action):
        return False
    resources = _listed(statement["Resource"])
    if not any(_covers(_fill_in(r, request), request.resource) for r in resources):
        return False
    conditions = statement.get("Condition", {}).items()
    return all(
        _holds(operator, key, [_fill_in(str(value), request) for value in _listed(values)], request)
        for operator, tests in conditions
        for key, values in tests.items()
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _fill_in(text: str, request: Request) -> str:
    """Replace variables such as ``${aws:PrincipalAccount}``; unknown ones stay and match nothing."""
    return _VARIABLE.sub(lambda match: str(request.context.get(match[1], match[0])), text)


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)


@functools.cache
def _names(patterns: tuple[str, ...], action: str) -> bool:
    return any(is_like(pattern.lower(), action.lower()) for pattern in patterns)


def is_like(pattern: str, text: str) -> bool:
    return _pattern(pattern).fullmatch(text) is not None


def _covers(pattern: str, arn: str) -> bool:
    """Return whether a pattern matches an ARN; wildcards do not match across the ARN's first five colons."""
    if pattern == "*":
        return True
    parts = pattern.split(":", 5), arn.split(":", 5)
    return len(parts[0]) == len(parts[1]) and all(map(is_like, *parts))


def _same_truth(wanted: str, found: str) -> bool:
    return wanted.lower() == found.lower()


# Each operator's comparison.
OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": str.__eq__,
    "StringLike": is_like,
    "NumericEquals": str.__eq__,
    "Bool": _same_truth,
    "Null": _same_truth,
}


def _holds(operator: str, key: str, wanted: Sequence[str], request: Request) -> bool:
    """Evaluate one line of a condition.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_condition-logic-multiple-context-keys-or-values.html
    """
    found = next((v for k, v in request.context.items() if k.lower() == key.lower()), None)
    if operator == "Null":
        return _same_truth(wanted[0], str(found is None))
    if found is None:
        return False
    values = (found,) if isinstance(found, str) else found
    compare = OPERATORS[operator]
    return any(compare(each, value) for each in wanted for value in values)
