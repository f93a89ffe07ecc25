"""Commands on jobs, the table of all commands, and the parser, which imports only the requested one."""

from __future__ import annotations

from importlib import import_module

from cluster.cli import GROUPS as CLUSTER_GROUPS
from cluster.console.options import Option
from cluster.console.parser import Command, Parser

_JOBS = {
    "train": Command("jobs.cli.train", "train on all nodes"),
    "run": Command("jobs.cli.run", "run any program on all nodes"),
    "jobs": Command("jobs.cli.jobs", "list a cluster's jobs: queued, running, and ended"),
    "top": Command("jobs.cli.top", "watch nodes, ranks, and the queue live"),
    "attach": Command("jobs.cli.attach", "follow a job, and fetch its results at its end"),
    "logs": Command("jobs.cli.jobs", "print the log of a job or of one rank"),
    "wait": Command("jobs.cli.attach", "wait until a job ends"),
    "cancel": Command("jobs.cli.jobs", "end a job on all nodes"),
    "fetch": Command("jobs.cli.results.fetch", "download a job's model, log, and results"),
    "report": Command("jobs.cli.results.report", "write a one-page report of a run"),
    "predict": Command("jobs.cli.results.predict", "use a trained model on texts or a file"),
    "bench": Command("jobs.cli.bench", "measure every node and name slow ones"),
    "tune": Command(
        "jobs.cli.tune", "find the fastest placement of a training job, or how it scales"
    ),
}
GROUPS = {
    "cluster": CLUSTER_GROUPS["cluster"],
    "jobs": _JOBS,
    "software": {
        "stacks": CLUSTER_GROUPS["software"]["stacks"],
        "bake": Command("jobs.cli.bake", "make an image ahead of time, so `up` installs nothing"),
        "images": CLUSTER_GROUPS["software"]["images"],
    },
    "upkeep": CLUSTER_GROUPS["upkeep"]
    | {
        "config": Command(
            "jobs.cli.setup.config", "show or write spr-cluster.toml, and what it sets"
        ),
        "docs": Command("jobs.cli.setup.docs", "print a guide for agents and scripts"),
        "completion": Command(
            "jobs.cli.setup.completion", "print a completion script for your shell"
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
_DESCRIPTION = """\
Train on a cluster of AWS Sapphire Rapids machines, from your laptop:

  spr-cluster up --nodes 4        create, install, connect, and verify the nodes
  spr-cluster train squad         fine-tune DistilBERT on SQuAD on all of them
  spr-cluster down                remove everything, and verify that it is gone

The same without an account and at no cost, in containers on this machine (Linux, root):

  spr-cluster up --nodes 2 --cloud local
"""
_EPILOG = """\
`spr-cluster COMMAND --help` shows a command's options and examples.
Exit codes: 0 done, 1 failed, 2 usage error and nothing changed, 130 interrupted by Ctrl-C,
129 terminal closed."""


def _render_commands() -> str:
    """Return the list of commands by group, as ``--help`` shows it."""
    parts = []
    for group, commands in GROUPS.items():
        rows = [f"  {name:<11} {each.help}" for name, each in commands.items()]
        parts.append("\n".join([f"{group}:", *rows]))
    return "\n\n".join(parts)


def build_parser(command: str | None = None) -> Parser:
    """Return the parser with one command's options; without a command, only what ``--help`` needs."""
    parser = Parser(
        "spr-cluster",
        usage="spr-cluster COMMAND [options]",
        description=_DESCRIPTION,
        epilog=f"{_render_commands()}\n\n{_EPILOG}",
    )
    parser.add(
        [Option("version", "print the version and exit", ("--version",), takes=0, const=True)]
    )
    if command is not None:
        import_module(COMMANDS[command].module).add_parser(parser)
    return parser
