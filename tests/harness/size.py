"""`make size`: how much there is to learn and to maintain, beside the project's limits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cluster.console.parser import Parser
from jobs.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
# Data and text that the folders contain are not source.
NOT_SOURCE = {".json", ".jsonl", ".conll", ".txt", ".md"}


def options_of(parser: Parser) -> list[str]:
    """Return a command's options and arguments, including those that only `--advanced` shows."""
    return [(each.flags or (each.name,))[-1] for each in parser.options]


def lines_of(*folders: str) -> int:
    names = subprocess.check_output(["git", "ls-files", "--", *folders], cwd=ROOT, text=True)
    files = [ROOT / each for each in names.splitlines()]
    source = (each for each in files if each.suffix not in NOT_SOURCE and each.exists())
    return sum(len(each.read_bytes().splitlines()) for each in source)


def main() -> None:
    os.environ["COLUMNS"] = "80"
    shown = [name for name, command in COMMANDS.items() if command.help]
    parsers = [each for name in shown for each in build_parser(name).children[name].walk()]
    leaves = [each for each in parsers if not each.needs_command]
    slots = [option for leaf in leaves for option in options_of(leaf)]
    helps = [each.format_help() for each in (build_parser(), *parsers)]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    docs = [each.read_text() for each in pages if each.name != "commands.md"]
    rows: list[tuple[str, int, int | None]] = [
        ("leaf commands", len(leaves), 46),
        ("option slots", len(slots), 850),
        ("different flags", len({each for each in slots if each.startswith("-")}), None),
        ("words of --help", len(" ".join(helps).split()), 16_000),
        ("words of docs and README", len(" ".join(docs).split()), 18_000),
        ("product lines", lines_of("infra", "provision", "cluster", "jobs", "spr_cluster"), 51_500),
        ("  embedded cloud", lines_of("infra/local"), None),
        ("test lines", lines_of("tests"), 55_000),
        ("benchmark lines", lines_of("benchmarks"), 4_200),
    ]
    for name, value, limit in rows:
        print(f"{name:<26}{value:>8,}" + (f"  of {limit:>6,}" if limit else ""))


if __name__ == "__main__":
    main()
