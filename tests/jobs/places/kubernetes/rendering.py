"""Jobs as `train squad --to kubernetes-yaml` makes them, from its command line, at a fixed time."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import cache
from itertools import product

from jobs.cli.train import render_pods
from jobs.places.kubernetes.manifests import Rendered
from tests.jobs.context import parse_request

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
CLAIMS: dict[str, tuple[str, ...]] = {"new": (), "existing": ("--claim", "data")}
EVERY = [(*recipe, "--kind", kind) for recipe, kind in product(RECIPES.values(), KINDS)]


@cache
def rendered(*words: str) -> Rendered:
    job = ["train", "squad", "--to", "kubernetes-yaml", "--nodes", "4", "--job-name", "bert"]
    return render_pods(parse_request(*job, *words), NOW)
