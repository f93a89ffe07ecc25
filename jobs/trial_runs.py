"""A trial of a training job on nodes: placed, run for some seconds, and its speed read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cluster.nodes import Cluster
from infra.errors import UsageError
from infra.progress import Progress
from jobs.placement import plan_placement
from jobs.request import chosen_backend
from jobs.running import Event, Output, explain, private_addresses, run_command
from jobs.spec import JobPaths, PlacementWish
from jobs.squad.options import TrainOptions
from jobs.train import build_training
from provision.facts import HostFacts
from provision.host import Host
from provision.stacks import Stack


@dataclass(frozen=True)
class TrialRun:
    """What came of it: features a second of all ranks and how long a step took, or why it failed.

    ``threads`` are those with which a rank computes, ``nproc_per_node`` the ranks of a node,
    ``gradient_bytes`` those of a step that a rank has to exchange.
    """

    nproc_per_node: int | None = None
    threads: int | None = None
    samples_per_second: float | None = None
    step_s: float | None = None
    gradient_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True)
class TrialBench:
    """Where trials run: one folder on the nodes for all of them, so that files travel once.

    ``seconds`` are those of each trial. Nodes of which ``cluster`` has no more take no part.
    """

    cluster: Cluster
    stack: Stack
    head: Host
    facts: Mapping[str, HostFacts]
    paths: JobPaths
    seconds: int
    progress: Progress
    on_log: Callable[[str], None]

    def first(self, nodes: int) -> TrialBench:
        """The same on the first nodes alone."""
        cluster = self.cluster.first(nodes)
        facts = {node.name: self.facts[node.name] for node in cluster.nodes}
        return replace(self, cluster=cluster, facts=facts)

    def run(self, options: TrainOptions, wish: PlacementWish, title: str) -> TrialRun:
        """Try this out. What can't be placed, or fails, is an outcome too."""
        with self.progress.phase(title):
            done = self._run(replace(options, trial_seconds=self.seconds), wish)
            speed = done.samples_per_second
            told = f"failed: {done.failure}" if speed is None else f"{speed:.1f} samples/s"
            self.progress.note(told)
            return done

    def _run(self, options: TrainOptions, wish: PlacementWish) -> TrialRun:
        backend = chosen_backend(options, self.stack)
        try:
            placement = plan_placement(self.facts, private_addresses(self.cluster), wish, backend)
        except UsageError as error:
            return TrialRun(failure=error.message)
        command = build_training(self.cluster, self.stack, placement, options, self.paths)
        layout = placement.ranks
        found: list[Event] = []
        output = Output(lambda event: _show(event, found, self.progress), self.on_log, quiet=True)
        exit_code = run_command(self.head, command, self.paths, output)
        done = TrialRun(layout.nproc_per_node, layout.omp_threads)
        if exit_code != 0 or not found:
            return replace(done, failure=explain(exit_code, output, "").message)
        trial = found[-1]
        return replace(
            done,
            samples_per_second=float(trial["samples_per_second"]),
            step_s=float(trial["seconds"]) / max(int(trial["steps"]), 1),
            gradient_bytes=int(trial["gradient_bytes"]),
        )


def _show(event: Event, found: list[Event], progress: Progress) -> None:
    if event["event"] == "phase":
        progress.note(event["name"])
    elif event["event"] == "trial":
        found.append(event)
