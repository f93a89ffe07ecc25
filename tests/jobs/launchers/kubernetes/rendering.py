"""Jobs as `render k8s` makes them, from its command line, at a fixed time."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from itertools import product

from cluster.console.parser import Parser
from jobs.cli.elsewhere.pod_options import add_pod_options, build_rendered
from jobs.launchers.kubernetes.manifests import Rendered

NOW = datetime(2026, 11, 22, 14, 25, 1, tzinfo=timezone.utc)
_ON_CLAIM = ("--recipe", "reference", "--run-qa", "/workspace/run_qa", "--stack")
RECIPES: dict[str, tuple[str, ...]] = {
    "fast-upstream": ("--batch-size", "16"),
    "fast-intel": ("--batch-size", "16", "--stack", "intel"),
    "reference-reference": ("--recipe", "reference"),
    "reference-intel": (*_ON_CLAIM, "intel"),
    "reference-upstream": (*_ON_CLAIM, "upstream"),
}
KINDS = ("TrainJob", "PyTorchJob")
CLAIMS: dict[str, tuple[str, ...]] = {
    "new": (),
    "new-with-class": ("--claim-size", "2Ti", "--storage-class", "nfs"),
    "existing": ("--claim", "data"),
}
EVERY = [
    (*recipe, "--kind", kind, *claim)
    for recipe, kind, claim in product(RECIPES.values(), KINDS, CLAIMS.values())
]


def parse(*words: str) -> argparse.Namespace:
    parser = Parser()
    parser.set_defaults(task="squad")
    add_pod_options(parser, "squad")
    return parser.parse_args(["--nodes", "4", "--name", "bert", *words])


def rendered(*words: str) -> Rendered:
    return build_rendered(parse(*words), NOW)
