"""docs/commands.md, which this file writes from the parsers: `make reference`."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jobs.cli import build_parser
from jobs.cli.commands import GROUPS
from tests.golden import check_golden

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
INTRODUCTION = """\
# Commands

`make reference` generates this page from the parsers. [Reference](reference.md) explains exit codes,
JSON output, and how commands choose a cluster.

## Common options

"""
COMMON = 8
"""Options of so many commands are listed once, at the top."""
SHARED = 10
"""A command that shares so many other options with an earlier one refers to it."""
Options = dict[str, str]
"""Options and arguments by name, as lines of Markdown."""


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a command's parser and those of its subcommands, except those that require a subcommand."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not any(action.required for action in nested):
        yield parser
    for action in nested:
        for child in action.choices.values():
            yield from leaves(child)


def parsers_of(name: str) -> list[argparse.ArgumentParser]:
    actions = build_parser(name)._actions
    (commands,) = (a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    return list(leaves(commands[name]))


def options_of(parser: argparse.ArgumentParser) -> Options:
    formatter = parser._get_formatter()
    lines = {}
    for action in parser._actions:
        if action.help and action.help != argparse.SUPPRESS and action.dest != "help":
            text = " ".join(formatter._expand_help(action).split())
            name = formatter._format_action_invocation(action)
            lines[(action.option_strings or [name])[0]] = f"- `{name}`: {text}"
    return lines


def to_markdown(text: str | None) -> str:
    """Indented lines become code."""
    parts = re.sub(
        r"(?m)^((?: .*\n?)+)", lambda m: "\n" + re.sub("(?m)^ ", "   ", m[1]), text or ""
    )
    return parts.strip("\n").replace("examples:", "Examples:", 1) + "\n"


def list_options(options: Options, common: Options, earlier: dict[str, Options]) -> str:
    """List a command's options, by reference to the common ones and to a similar command."""
    also = [f"`{name}`" for name, line in options.items() if common.get(name) == line]
    own = {name: line for name, line in options.items() if common.get(name) != line}
    base = max(earlier, key=lambda name: len(own.items() & earlier[name].items()), default="")
    lines = [f"Common options: {', '.join(also)}.\n"] if also else []
    if base and len(own.items() & earlier[base].items()) >= SHARED:
        lost = [f"`{name}`" for name in earlier[base] if name not in options]
        less = f", except {', '.join(lost)}" if lost else ""
        lines.append(f"Options of [`{base}`](#{base.replace(' ', '-')}){less}.\n")
        own = {name: line for name, line in own.items() if line not in earlier[base].values()}
    return "\n".join([*lines, *own.values()]) + "\n"


def render_page() -> str:
    found = {n: parsers_of(n) for commands in GROUPS.values() for n in commands}
    options = {leaf.prog: options_of(leaf) for each in found.values() for leaf in each}
    # Each top-level command counts once; a dictionary keeps the order, unlike a set.
    uses = Counter(
        item
        for each in found.values()
        for item in dict.fromkeys(item for leaf in each for item in options[leaf.prog].items())
    )
    common = {name: line for (name, line), times in uses.items() if times >= COMMON}
    parts = [INTRODUCTION + "\n".join(common.values()) + "\n"]
    earlier: dict[str, Options] = {}
    for group, commands in GROUPS.items():
        parts.append(f"## {group.capitalize()}\n")
        for leaf in (leaf for name in commands for leaf in found[name]):
            parts += [f"### {leaf.prog}\n", to_markdown(leaf.description)]
            parts += [list_options(options[leaf.prog], common, earlier), to_markdown(leaf.epilog)]
            earlier[leaf.prog] = options[leaf.prog]
    return "\n".join(parts)


def test_the_page_shows_what_the_parsers_know() -> None:
    check_golden(PAGE, render_page())
