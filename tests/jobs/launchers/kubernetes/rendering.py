"""Jobs as `train squad --to kubernetes-yaml` makes them, from its command line, at a fixed time."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from itertools import product

from jobs.cli import build_parser
from jobs.cli.places.kubernetes import read_job
from jobs.launchers.kubernetes.manifests import Rendered

NOW = datetime(2026, 11, 22, 14, 25, 1, tzinfo=timezone.utc)
_ON_CLAIM = ("--recipe", "reference", "--run-qa", "/workspace/run_qa", "--stack")
RECIPES: dict[str, tuple[str, ...]] = {
    "fast-upstream": (),
    "fast-intel": ("--stack", "intel"),
    "reference-reference": ("--recipe", "reference"),
    "reference-intel": (*_ON_CLAIM, "intel"),
    "reference-upstream": (*_ON_CLAIM, "upstream"),
}
KINDS = ("TrainJob", "PyTorchJob")
CLAIMS: dict[str, tuple[str, ...]] = {
    "new": (),
    "existing": ("--claim", "data"),
}
EVERY = [
    (*recipe, "--kind", kind, *claim)
    for recipe, kind, claim in product(RECIPES.values(), KINDS, CLAIMS.values())
]
_PARSER = build_parser("train")


def parse(*words: str) -> argparse.Namespace:
    job = ["train", "squad", "--to", "kubernetes-yaml", "--nodes", "4", "--job-name", "bert"]
    return _PARSER.parse_args([*job, *words])


def rendered(*words: str) -> Rendered:
    return read_job(parse(*words), NOW)
