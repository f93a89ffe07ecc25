"""The table of commands: which module runs each one, and its line in ``spr-cluster --help``.

Only the module of the command that was asked for is imported, so ``--help`` stays fast.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command's module, whose ``add_parser`` defines its options, and its one-line help."""

    module: str
    help: str


GROUPS: dict[str, dict[str, Command]] = {
    "cluster": {
        "up": Command("cluster.cli.up", "create, install, connect, and verify a cluster"),
        "plan": Command("cluster.cli.up", "show what `up` would do and what it costs"),
        "status": Command("cluster.cli.status", "show a cluster's nodes, cost, and time left"),
        "verify": Command("cluster.cli.verify", "check every node and the network between them"),
        "repair": Command("cluster.cli.up", "replace dead or unhealthy nodes"),
        "ssh": Command("cluster.cli.ssh", "open a shell on a node"),
        "extend": Command("cluster.cli.extend", "extend a cluster's time to live"),
        "down": Command("cluster.cli.down", "remove everything, and verify that it is gone"),
    },
    "jobs": {
        "train": Command("jobs.cli.train", "train on all nodes"),
        "run": Command("jobs.cli.run", "run any program on all nodes"),
        "jobs": Command("jobs.cli.jobs", "list a cluster's jobs: queued, running, and ended"),
        "top": Command("jobs.cli.top", "watch nodes, ranks, and the queue live"),
        "attach": Command("jobs.cli.attach", "follow a job, and fetch its results at its end"),
        "logs": Command("jobs.cli.logs", "print the log of a job or of one rank"),
        "wait": Command("jobs.cli.wait", "wait until a job ends"),
        "cancel": Command("jobs.cli.cancel", "end a job on all nodes"),
        "fetch": Command("jobs.cli.fetch", "download a job's model, log, and results"),
        "report": Command("jobs.cli.report", "write a one-page report of a run"),
        "predict": Command("jobs.cli.predict", "answer questions with a trained model"),
        "bench": Command("jobs.cli.bench", "measure every node and name slow ones"),
        "tune": Command("jobs.cli.tune", "find the fastest placement of a training job"),
        "scaling": Command("jobs.cli.scaling", "measure a training job on more and more nodes"),
        "k8s": Command("jobs.cli.k8s", "the same training job on Kubernetes"),
        "render": Command("jobs.cli.render", "the same training job as YAML or a Slurm script"),
    },
    "software": {
        "stacks": Command("cluster.cli.stacks", "list, check, and lock software stacks"),
        "bake": Command(
            "cluster.cli.bake", "make an image ahead of time, so `up` installs nothing"
        ),
        "images": Command("cluster.cli.images", "list, delete, and prune images"),
    },
    "upkeep": {
        "list": Command("cluster.cli.list", "show all clusters, with age and cost so far"),
        "gc": Command("cluster.cli.list", "find forgotten clusters and remove them"),
        "events": Command("cluster.cli.events", "show what was done to a cluster, and why"),
        "doctor": Command("cluster.cli.doctor", "check whether `up` would succeed, for free"),
        "iam-policy": Command("cluster.cli.iam_policy", "print the least IAM policy required"),
        "local": Command("cluster.cli.local", "manage the embedded cloud on this machine"),
        "completion": Command("jobs.cli.completion", "print a completion script for your shell"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def render_commands() -> str:
    """Return the list of commands by group, as ``--help`` shows it."""
    parts = []
    for group, commands in GROUPS.items():
        rows = [f"  {name:<11} {command.help}" for name, command in commands.items()]
        parts.append("\n".join([f"{group}:", *rows]))
    return "\n\n".join(parts)
