"""`make size`: how much there is to learn and to maintain, beside the project's limits."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
# Data and text that the folders contain are not source.
NOT_SOURCE = {".json", ".jsonl", ".conll", ".txt", ".md"}


def subcommands(parser: argparse.ArgumentParser) -> list[Any]:
    return [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]


def listed(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a command's parser and those of the subcommands that its help lists."""
    yield parser
    for action in subcommands(parser):
        for shown in action._choices_actions:
            yield from listed(action.choices[shown.dest])


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return a command's options and arguments, including those that only `--advanced` shows."""
    return [
        (action.option_strings or [action.dest])[-1]
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and action.dest != "help"
        and action.nargs != argparse.PARSER
    ]


def lines_of(*folders: str) -> int:
    names = subprocess.check_output(["git", "ls-files", "--", *folders], cwd=ROOT, text=True)
    files = [ROOT / each for each in names.splitlines()]
    source = (each for each in files if each.suffix not in NOT_SOURCE and each.exists())
    return sum(len(each.read_bytes().splitlines()) for each in source)


def main() -> None:
    os.environ["COLUMNS"] = "80"
    shown = [name for name, command in COMMANDS.items() if command.help]
    tops = [subcommands(build_parser(name))[0].choices[name] for name in shown]
    parsers = [parser for top in tops for parser in listed(top)]
    leaves = [each for each in parsers if not any(sub.required for sub in subcommands(each))]
    slots = [option for leaf in leaves for option in options_of(leaf)]
    helps = [each.format_help() for each in (build_parser(), *parsers)]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    docs = [each.read_text() for each in pages if each.name != "commands.md"]
    rows: list[tuple[str, int, int | None]] = [
        ("leaf commands", len(leaves), 46),
        ("option slots", len(slots), 850),
        ("different flags", len({each for each in slots if each.startswith("-")}), None),
        ("words of --help", len(" ".join(helps).split()), 16_000),
        ("words of docs and README", len(" ".join(docs).split()), 18_000),
        ("product lines", lines_of("infra", "provision", "cluster", "jobs"), 51_500),
        ("  embedded cloud", lines_of("infra/local"), None),
        ("test lines", lines_of("tests"), 55_000),
        ("benchmark lines", lines_of("benchmarks"), 4_200),
    ]
    for name, value, limit in rows:
        print(f"{name:<26}{value:>8,}" + (f"  of {limit:>6,}" if limit else ""))


if __name__ == "__main__":
    main()
