"""``spr-cluster train``: one subcommand for each task."""

from __future__ import annotations

from cluster.cli.parser import SubParsers, add_command
from jobs.cli import train_task
from jobs.worker.tasks import TASKS

_EXAMPLES = """\
  spr-cluster train squad                     DistilBERT on SQuAD
  spr-cluster train classify --data texts.csv --eval-fraction 0.1
  spr-cluster train tag --data train.conll --eval dev.conll
  spr-cluster train digits                    does this cluster train? no data, seconds
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        "Train with PyTorch DDP on all nodes of a cluster, and fetch the results.",
        _EXAMPLES,
    )
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for task in TASKS:
        train_task.add_parser(jobs, task)
