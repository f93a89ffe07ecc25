"""Options that several job commands share."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from cluster.cli.parser import positive_int
from jobs.launch.plan import PLACEMENTS, PlacementOptions, new_job_id
from jobs.train.request import expand_home


def add_placement_options(
    group: argparse._ArgumentGroup, ppn: str = "one per NUMA node", *, backend: bool = True
) -> None:
    """Add ``--nodes``, ``--ppn``, ``--placement``, ``--ccl-workers``, and ``--backend``.

    ``ppn`` describes the default of ``--ppn``.
    """
    add = group.add_argument
    add("--nodes", type=positive_int, metavar="N", help="use the first N nodes (default: all)")
    add("--ppn", type=positive_int, metavar="N", help=f"ranks per node (default: {ppn})")
    add(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="auto: each rank on its own cores; reference: the published recipe's numbers, which "
        "start more threads than there are cores (default: auto)",
    )
    add(
        "--ccl-workers",
        type=positive_int,
        metavar="N",
        help="cores per rank for oneCCL's workers instead of computing (default: 1)",
    )
    if backend:
        add(
            "--backend",
            choices=("auto", "ccl", "gloo"),
            default="auto",
            help="communication backend of the ranks; ccl reserves cores (default: the stack's)",
        )


def read_placement(args: argparse.Namespace) -> PlacementOptions:
    """Return the values of :func:`add_placement_options`."""
    return PlacementOptions(args.placement, args.ppn, args.ccl_workers)


def results_folder(args: argparse.Namespace, kind: str, now: datetime) -> Path:
    """Return the folder of ``--results``, by default ``results/JOB``."""
    return expand_home(args.results) if args.results else Path("results", new_job_id(kind, now))
