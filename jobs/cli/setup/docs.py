"""``spr-cluster docs --agent``: a guide for programs that drive this tool, made from its parsers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from cluster.console.options import Request, switch
from cluster.console.parser import Parser, add_request
from jobs.cli import COMMANDS, build_parser


@dataclass(frozen=True, kw_only=True)
class DocsRequest(Request):
    """Print a guide for programs that drive this tool: rules, all commands and options, and JSON.

    examples:
      spr-cluster docs --agent
      spr-cluster docs --agent > skills/spr-cluster/SKILL.md
    """

    agent: bool = switch("print the guide", required=True)


def add_parser(parent: Parser) -> None:
    add_request(parent, "docs", run, DocsRequest)


def run(_: DocsRequest) -> int:
    print(render_guide())
    return 0


def render_guide() -> str:
    """Return the guide in Markdown, which is also a skill: https://agentskills.io/specification."""
    rules, json_output = (
        resources.files("jobs.cli.setup").joinpath(name).read_text(encoding="utf-8")
        for name in ("agent_rules.md", "json_output.md")
    )
    return "\n".join([rules, *_commands(), "", json_output.strip()])


def _commands() -> Iterator[str]:
    for name, command in COMMANDS.items():
        if command.help:
            yield f"\n`{name}`: {command.help}\n"
            yield from (
                f"    {' '.join([each.prog, *(option.usage for option in each.options)])}"
                for each in build_parser(name).children[name].walk()
                if each.options
            )
