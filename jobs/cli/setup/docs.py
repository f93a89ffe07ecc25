"""``spr-cluster docs --agent``: a guide for programs that drive this tool, made from its parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module, resources

from cluster.console.parser import SubParsers, add_command
from jobs.cli.shared.project_options import parser_of

_EXAMPLES = """\
  spr-cluster docs --agent
  spr-cluster docs --agent > SKILL.md
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "docs",
        "Print a guide for programs that drive this tool: rules, all commands and options, and JSON.",
        _EXAMPLES,
        run=run,
    )
    parser.add_argument("--agent", action="store_true", required=True, help="print the guide")


def run(_: argparse.Namespace) -> int:
    print(render_guide())
    return 0


def render_guide() -> str:
    """Return the guide in Markdown, which is also a skill file for agents."""
    rules, json_output = (
        resources.files("jobs.cli.setup").joinpath(name).read_text(encoding="utf-8")
        for name in ("agent_rules.md", "json_output.md")
    )
    return "\n".join([rules, *_commands(), "", json_output.strip()])


def _commands() -> Iterator[str]:
    table = import_module("jobs.cli")  # it imports this module
    for name, command in table.COMMANDS.items():
        if command.help:
            yield f"\n`{name}`: {command.help}\n"
            yield from (
                f"    {line}" for line in _usages(parser_of(table.build_parser(name), name))
            )


def _usages(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a command's usage in one line, and those of its subcommands."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        words = " ".join(parser.format_usage().split())
        yield words.removeprefix("usage: ").replace(" [-h]", "", 1)
    for action in below:
        for sub in action.choices.values():
            yield from _usages(sub)
