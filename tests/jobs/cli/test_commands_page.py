"""docs/commands.md, which this file writes from the parsers: `make reference`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cluster.console.parser import Parser
from jobs.cli import GROUPS, build_parser
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


def leaves(parser: Parser) -> Iterator[Parser]:
    """Yield a command's parser and those of its subcommands, except those that require a subcommand."""
    return (each for each in parser.walk() if not each.needs_command)


def parsers_of(name: str) -> list[Parser]:
    return list(leaves(build_parser(name).children[name]))


def options_of(parser: Parser) -> Options:
    return {
        (each.flags or (each.shown,))[0]: f"- `{each.shown}`: {' '.join(each.help.split())}"
        for each in parser.options
    }


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
    found = {
        n: parsers_of(n) for group in GROUPS.values() for n, each in group.items() if each.help
    }
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
        for leaf in (leaf for name in commands for leaf in found.get(name, ())):
            parts += [f"### {leaf.prog}\n", to_markdown(leaf.description)]
            parts += [list_options(options[leaf.prog], common, earlier), to_markdown(leaf.epilog)]
            earlier[leaf.prog] = options[leaf.prog]
    return "\n".join(parts)


def test_the_page_shows_what_the_parsers_know() -> None:
    check_golden(PAGE, render_page())
