"""The forms of names and sizes that other systems take."""

from __future__ import annotations

import re
from collections.abc import Mapping

from infra.errors import UsageError
from jobs.worker.training.options import flag


def check_forms(options: object, forms: Mapping[str, tuple[str, str]]) -> None:
    """Raise :class:`UsageError` for an option that is given and has not the form of its name.

    A form is a regular expression, and the words for it.
    """
    for name, (form, wanted) in forms.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise UsageError(f"{flag(name)} {value!r}: expected {wanted}")
