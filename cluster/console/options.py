"""Options as data: a dataclass is a command line, keys of spr-cluster.toml, and keywords in Python."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from infra.errors import UsageError

REST = argparse.REMAINDER
"""An argument that takes all further words, such as another program's."""
CLUSTER = "cluster"
"""The usual place of a job."""
EVERYWHERE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """An option or, without ``flags``, an argument. ``name`` is the attribute that gets its value."""

    name: str
    help: str = ""
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str], Any] = str
    """Raises ``ValueError`` or :class:`UsageError` for an invalid value."""
    choices: tuple[Any, ...] = ()
    const: Any = None
    """The value that it sets without an argument; a switch takes none."""
    takes: str | int | None = None
    """How many words it takes, as argparse's ``nargs``; 0 for a switch."""
    is_list: bool = False
    """Whether it has several values: separated by commas, or with ``repeats`` one each time."""
    repeats: bool = False
    if_empty: tuple[str, ...] = ()
    """What an empty list of a file or in Python means, if it repeats."""
    required: bool = False
    excludes: str = ""
    """The name of a group of options of which only one may be given."""
    needs: str = ""
    """What it would have no effect without, so it is refused: a flag, or one with its value."""
    places: tuple[str, ...] = (CLUSTER,)
    """The places of a job where it has an effect, or :data:`EVERYWHERE`. All others refuse it."""
    section: str = ""
    """The heading below which ``--help`` lists it."""
    can_clear: bool = False
    """Whether the opposite of a switch is a value as well: without either, a cluster keeps its own."""
    for_experts: bool = False
    """Whether only ``--help --advanced`` shows it."""

    @property
    def label(self) -> str:
        """The option as messages name it, such as ``--yes`` or ``JOB``."""
        long = (flag for flag in self.flags if flag.startswith("--"))
        return next(long, self.metavar or self.name)

    @property
    def is_switch(self) -> bool:
        return self.takes == 0

    @property
    def is_number(self) -> bool:
        return self.parse in (int, float, positive_int)

    @property
    def shown(self) -> str:
        """The option with its value, as ``--help`` shows it."""
        value = self.metavar or (
            "{" + ",".join(map(str, self.choices)) + "}" if self.choices else ""
        )
        value = value or (
            self.flags[-1].lstrip("-").replace("-", "_").upper() if self.flags else self.name
        )
        if not self.flags:
            return value
        value = {0: "", "?": f" [{value}]"}.get(self.takes, f" {value}")
        return ", ".join(f"{flag}{value}" for flag in self.flags)

    @property
    def usage(self) -> str:
        """The option as in a usage line: in brackets, if it can be omitted."""
        if self.flags:
            shown = self.shown.split(", ")[0]
            return shown if self.required else f"[{shown}]"
        forms = {"?": f"[{self.shown}]", "*": f"[{self.shown} ...]", "+": f"{self.shown} ..."}
        return "..." if self.takes == REST else forms.get(str(self.takes), self.shown)


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1. Raises ``ValueError``."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise ValueError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def parse_number(text: str, is_valid: Callable[[float], bool], expected: str) -> float:
    """Parse a number. Raises ``ValueError`` with what was ``expected``, also for what is no number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not is_valid(found):
        raise ValueError(f"{text!r}: expected {expected}")
    return found


def option(help_: str, default: Any = None, **how: Any) -> Any:
    """Return a dataclass field that is an option; ``how`` are the other fields of :class:`Option`.

    The flag is the field's name. A field of type ``tuple`` takes several values.
    """
    return field(default=default, metadata={"option": {"help": help_, **how}})


def switch(help_: str, *, default: bool = False, **how: Any) -> Any:
    """Return a dataclass field that is an option without a value; it sets the opposite of ``default``."""
    return option(help_, default, takes=0, const=not default, **how)


def argument(help_: str, default: Any = MISSING, **how: Any) -> Any:
    """Return a dataclass field that is an argument without a flag, required unless it has a default."""
    how = {"flags": (), "takes": None if default is MISSING else "?", **how}
    return field(default=default, metadata={"option": {"help": help_, **how}})


def options_of(cls: type[Any]) -> Iterator[Option]:
    """Yield the options of a dataclass: its own before those that it inherits."""
    known = {each.name: each for each in fields(cls)}
    names = dict.fromkeys(
        name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())
    )
    for each in (known[name] for name in names if name in known):
        if how := each.metadata.get("option"):
            yield _describe(each, how)


def _describe(each: Field[Any], how: Mapping[str, Any]) -> Option:
    default: dict[str, Any] = {"flags": (f"--{each.name.replace('_', '-')}",)}
    if str(each.type).startswith("tuple"):
        default |= {"is_list": True}
    return Option(each.name, **{**default, **how})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command is asked to do: the base of all commands' options."""

    verb: str = ""
    """The command's name."""
    words: tuple[str, ...] = ()
    """The command line, without the values of variables."""
    json: bool = False
    sink: Callable[[object], None] | None = None
    """Takes what ``--json`` would print, instead of stdout."""

    def has_set(self, name: str) -> bool:
        """Return whether an option has another value than its default."""
        return any(
            getattr(self, name) != each.default for each in fields(self) if each.name == name
        )


YES = ("--yes", "-y")


@dataclass(frozen=True, kw_only=True)
class JsonRequest(Request):
    """A request with ``--json``."""

    json: bool = switch("print the result as JSON", places=EVERYWHERE)


def opposite(flag: str) -> str:
    """Return the option that cancels an earlier switch: ``--no-detach`` for ``--detach``, and vice versa."""
    return flag.replace("--no-", "--", 1) if flag.startswith("--no-") else f"--no-{flag[2:]}"


def as_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a ``type`` for argparse, whose errors name the option themselves."""
    if parse in (str, int, float):
        return parse

    def parse_word(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None

    return parse_word
