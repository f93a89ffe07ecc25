"""The parser of all commands: one-line errors, and help that fits the terminal."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from cluster.console.options import REST, Option, Request, as_type, opposite, options_of
from infra.errors import UsageError

_HELP_AT = 24
"""The column at which the texts of options begin."""


class Command(NamedTuple):
    """A command's module, whose ``add_parser`` defines its options, and its line in ``--help``."""

    module: str
    help: str = ""


class _Choices(tuple[Any, ...]):
    """The choices of an option; for an argument that may be omitted, argparse looks for an empty list."""

    def __contains__(self, value: object) -> bool:
        return value == [] or super().__contains__(value)


class Parser(argparse.ArgumentParser):
    """Reports mistakes in one line instead of the full usage, and can hide expert options from the help."""

    def __init__(self, prog: str, description: str = "", epilog: str = "", **more: Any) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False, **more)
        self.options: list[Option] = []
        self.actions: dict[str, argparse.Action] = {}
        """What argparse knows of them, by their names, for argcomplete."""
        self.children: dict[str, Parser] = {}
        self.request: type[Any] = Request
        """What its options become."""
        self.run: Callable[[Any], int] = lambda _: 0
        self.set_defaults(leaf=self)
        self.help_line = ""
        self.needs_command = False
        """Whether it can't run without a subcommand."""
        self._heading = "commands"
        self._below: Any = None
        self._shows_all = False

    def expect(self, metavar: str, heading: str) -> None:
        """Say what the subcommands are that :func:`add_command` adds."""
        self._heading, self.needs_command = heading, True
        self._below = self.add_subparsers(prog=self.prog, metavar=metavar, required=True)

    def walk(self) -> Iterator[Parser]:
        """Yield this parser and those of all subcommands."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def add_child(self, name: str, description: str, epilog: str) -> Parser:
        """Add a subcommand and return its parser."""
        if self._below is None:
            self.expect("COMMAND", "commands")
        child: Parser = self._below.add_parser(name, description=description, epilog=epilog)
        self.children[name] = child
        return child

    def add(self, options: Iterable[Option]) -> None:
        """Add options and arguments. Those that are not given have no value in the result."""
        groups: dict[str, Any] = {"": self}
        for each in options:
            self.options.append(each)
            how: dict[str, Any] = {"metavar": each.metavar, "nargs": each.takes}
            how["action"] = "append" if each.repeats else "store"
            if each.is_switch:
                how = {"action": "store_const", "const": each.const}
            else:
                how |= {"type": as_type(each.parse), "choices": _Choices(each.choices) or None}
                how |= {"const": each.const} if each.const is not None else {}
            how |= {"dest": each.name} | ({"required": True} if each.required else {})
            if not each.flags:
                del how["dest"]
                how |= {"metavar": each.metavar or each.name}
            if each.excludes not in groups:
                groups[each.excludes] = self.add_mutually_exclusive_group()
            add = groups[each.excludes].add_argument
            flags = each.flags or (each.name,)
            # argparse would compare the default of an omitted argument with the choices.
            default = argparse.SUPPRESS if each.flags else None
            self.actions[each.name] = add(*flags, default=default, **how)
            if each.can_clear:
                add(*map(opposite, flags), default=default, **{**how, "const": not each.const})
        if any(each.for_experts for each in self.options):
            self.add_argument("--advanced", action="help")

    def format_help(self) -> str:
        """Return the help; without ``--advanced``, it says how many options are hidden."""
        width = max(40, shutil.get_terminal_size().columns - 2)
        usual = [each for each in self.options if self._shows_all or not each.for_experts]
        epilog = self.epilog or ""
        if hidden := len(self.options) - len(usual):
            epilog = f"`--help --advanced` shows {hidden} more options for experts.\n\n{epilog}"
        parts = [fill(self.format_usage().strip(), width), fill(self.description or "", width)]
        rows = [(name, each.help_line) for name, each in self.children.items() if each.help_line]
        parts += [_list_rows(f"{self._heading}:", rows, width)] if rows else []
        for section in dict.fromkeys(each.section for each in usual):
            rows = [(each.shown, each.help) for each in usual if each.section == section]
            parts.append(_list_rows(f"{section or 'options'}:", rows, width))
        return "\n\n".join(part for part in (*parts, fill(epilog, width)) if part) + "\n"

    def format_usage(self) -> str:
        if self.usage:
            return f"usage: {self.usage}\n"
        words = [each.usage for each in self.options if each.required]
        words += ["[options]"] if any(each.flags for each in self.options) else []
        words += [each.usage for each in self.options if not each.flags]
        words += ["COMMAND"] if self.children else []
        return f"usage: {' '.join([self.prog, *words])}\n"

    def parse(self, line: Sequence[str], **more: Any) -> tuple[Parser, Any]:
        """Parse a command line; return the command's parser and its request, which also gets ``more``.

        Raises :class:`UsageError`.
        """
        words = vars(self.parse_args(line))
        leaf: Parser = words.pop("leaf")
        parsed = {name: value for name, value in words.items() if value not in (None, [])}
        given = [each for each in leaf.options if each.name in parsed]
        typed = {flag for each in given for flag in each.flags}
        typed |= {f"{flag} {parsed[each.name]}" for each in given for flag in each.flags}
        for each in given:
            # It is usually an unset shell variable, and must not mean the default.
            if parsed[each.name] == "":
                raise UsageError(f"{each.label} is empty", hint="give it a value, or omit it")
            if each.needs and each.needs not in typed:
                raise UsageError(f"{each.label} requires {each.needs}")
        parsed = {name: tuple(v) if isinstance(v, list) else v for name, v in parsed.items()}
        known = {each.name for each in fields(leaf.request)}
        own = {name: value for name, value in parsed.items() if name in known}
        if "given" in known:
            own["given"] = {name: value for name, value in parsed.items() if name not in known}
        return leaf, leaf.request(**{"verb": leaf.prog.split()[-1], **own, **more})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where similar names are known."""
        # `--help` acts as soon as it is parsed, and `--advanced` may follow it.
        self._shows_all = "--advanced" in (args or ())
        known, rest = super().parse_known_args(self._cancel_switches(args), namespace)
        if rest:
            what = "option" if rest[0].startswith("-") else "argument"
            problem = f"unknown {what} {rest[0]!r}{self._nearest(rest[0])}"
            for program in (each for each in self.options if each.takes == "+"):
                words = getattr(known, program.name)
                if args.index(words[0]) < args.index(rest[0]):
                    hint = f"put -- before the program: -- {shlex.join([*words, *rest])}"
                    raise UsageError(problem, hint=hint)
            self.error(problem)
        return known, rest

    def _cancel_switches(self, words: Any) -> Any:
        """Return the words without switches that an opposite follows, such as those of spr-cluster.toml."""
        if words is None or self.children or any(each.takes == REST for each in self.options):
            return words
        end = words.index("--") if "--" in words else len(words)
        cancels = [each for each in self.options if each.is_switch and not each.can_clear]
        switches = {name for each in cancels for name in each.flags}
        found: list[str] = []
        for word in words[:end]:
            if opposite(word) in switches:
                found = [each for each in found if each != opposite(word)]
            else:
                found.append(word)
        return [*found, *words[end:]]

    def _nearest(self, word: str) -> str:
        flags = [flag for each in self.options for flag in each.flags]
        names = [flag.lstrip("-") for flag in (*flags, "--help") if flag.startswith("--")]
        given = word.partition("=")[0].lstrip("-")
        for each in self.options:
            if not each.flags and word.startswith("--") and each.name == given:
                return f": give {each.metavar or given} without --{given}"
        near = [name for name in names if given and name.startswith(given)]
        near = near or difflib.get_close_matches(given, names, n=1)
        return f"; did you mean --{near[0]}?" if near and word.startswith("-") else ""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def fill(text: str, width: int) -> str:
    """Wrap paragraphs; leave indented lines, such as examples, unchanged."""
    parts: list[str] = []
    paragraph: list[str] = []
    for line in [*text.rstrip().splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        if paragraph:
            parts.append(textwrap.fill(" ".join(paragraph), width, break_on_hyphens=False))
            paragraph = []
        # Keep an example's command on one line; its comment moves below if both don't fit.
        command, *comment = re.split(r"(?<=\S)\s{2,}", line, maxsplit=1)
        fits = len(line) <= width or not comment
        parts += [line] if fits else [command, f"      {comment[0]}"]
    return "\n".join(parts).rstrip("\n")


def _list_rows(title: str, rows: Collection[tuple[str, str]], width: int) -> str:
    """Return a section of the help: names, and their texts beside them."""
    at = min(_HELP_AT, max(len(name) for name, _ in rows) + 4)
    lines = [title]
    for name, text in rows:
        wrapped = textwrap.wrap(" ".join(text.split()), width - at, break_on_hyphens=False)
        beside = len(name) + 4 <= at
        first = wrapped.pop(0) if beside and wrapped else ""
        lines.append(f"  {name:<{at - 2}}{first}".rstrip())
        lines += [f"{'':<{at}}{line}" for line in wrapped]
    return "\n".join(lines)


def add_command(
    parent: Parser,
    name: str,
    description: str,
    examples: str,
    help_: str | None = None,
    run: Callable[[Any], int] | None = None,
    options: type[Any] | None = None,
    more: Iterable[Option] = (),
) -> Parser:
    """Return a command's parser, with examples at the end of its help.

    ``run`` gets an instance of ``options``, a dataclass. Its ``given`` has the values of those in ``more``
    that the user gave. A subcommand is listed only with ``help_``.
    """
    parser = parent.add_child(name, description, f"examples:\n{examples}")
    parser.help_line = help_ or ""
    if options is not None and run is not None:
        parser.request, parser.run = options, run
        parser.add([*options_of(options), *more])
    return parser


def add_request(
    parent: Parser,
    name: str,
    run: Callable[[Any], int],
    options: type[Any],
    more: Iterable[Option] = (),
) -> None:
    """Add a command. The docstring of ``options`` is its help: what it does, and ``examples:``."""
    description, _, examples = (inspect.getdoc(options) or "").partition("\n\nexamples:\n")
    add_command(parent, name, description, f"{examples}\n", None, run, options, more)
