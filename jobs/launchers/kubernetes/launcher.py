"""A Kubernetes namespace as a launcher."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import SprError, UsageError
from infra.words import counted
from jobs.launchers.kubernetes import jobs
from jobs.launchers.kubernetes.errors import KubernetesError
from jobs.launchers.kubernetes.jobs import describe_record, exit_code, find_times
from jobs.launchers.kubernetes.pod_log import read_log
from jobs.launchers.kubernetes.resources import JobView, PodView
from jobs.launchers.kubernetes.results_reader import ResultsReader
from jobs.launchers.launcher import DELETED, QUEUED, Fetched, JobSummary
from jobs.launchers.plan import own_folder
from jobs.launchers.record import claim_results, write_record_text
from jobs.worker.supervisor.attempt import FAILED, SUCCEEDED

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

Show = Callable[[str], None]


@dataclass(frozen=True)
class SubmittedJob:
    """Where a job's files are; they stay readable after the job is deleted."""

    job: str
    claim: str
    image: str
    pull_secret: str | None = None


@dataclass(frozen=True)
class KubernetesLauncher:
    """A :class:`jobs.launchers.launcher.Launcher`. ``submitted``: the job that this machine remembers."""

    api: KubernetesApi
    flags: str = ""
    submitted: SubmittedJob | None = None

    @property
    def place(self) -> str:
        return f"in namespace {self.api.namespace} of context {self.api.context}"

    @property
    def where(self) -> dict[str, str]:
        return {"context": self.api.context, "namespace": self.api.namespace}

    @property
    def example(self) -> str:
        return "k8s submit squad --nodes N"

    @property
    def expires(self) -> None:
        return None

    @property
    def outlook(self) -> str:
        return ""

    def list_jobs(self) -> tuple[JobSummary, ...]:
        """Return the namespace's jobs, and, as deleted, the remembered one if it is not among them."""
        found = [self._summarize(job) for job in jobs.list_jobs(self.api)]
        known = self.submitted
        if known and known.job not in (job.job for job in found):
            begin = datetime.fromtimestamp(0, timezone.utc)
            found.insert(0, JobSummary(DELETED, job=known.job, submitted=begin))
        return tuple(found)

    def describe(self, job: JobSummary) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return a job's image, claim, conditions, and pods, and why it is not running."""
        view = jobs.find_job(self.api, job.job)
        if view is None:
            return {}, ()
        problems = jobs.explain(self.api, view)
        values = {
            "kind": view.kind.name,
            "claim": view.claim,
            "image": view.image,
            "conditions": [each._asdict() for each in view.conditions],
            "pods": [_describe_pod(pod) for pod in view.pods],
            "problems": [{"text": each.text, "fix": each.fix} for each in problems],
        }
        reasons = ((each.type, each.message or each.reason) for each in view.conditions)
        lines = [
            f"{view.kind.name}, image {view.image}, claim {view.claim or '-'}",
            *(f"{name}: {why}" for name, why in reasons if why),
            *(
                f"pod {pod.name}: {pod.phase} on {pod.node or '-'}, "
                f"{counted(pod.restarts, 'restart')}"
                for pod in view.pods
            ),
            *map(str, problems),
        ]
        return values, lines

    def follow(self, job: str, on_text: Show, on_wait: Show, on_state: Show) -> JobSummary:
        """Raises :class:`JobError` if the job is deleted meanwhile."""

        def show(problem: object) -> None:
            on_wait(str(problem))

        return self._summarize(jobs.follow_job(self.api, job, on_text, show))

    def read_log(
        self, job: JobSummary, on_text: Show, rank: int | None = None, *, follow: bool
    ) -> None:
        """Stream the log of a rank's pod; all ranks of a pod share its log."""
        view = jobs.require_job(self.api, job.job)
        ranks, number = view.nodes * view.node_ranks, rank or 0
        if not 0 <= number < ranks:
            raise UsageError(f"--rank {rank}: job {job.job} has {counted(ranks, 'rank')}, from 0")
        if follow:
            jobs.follow_job(self.api, job.job, on_text, _warn, number)
            return
        pod = view.pod(number)
        if pod is None or pod.phase == "Pending":
            reasons = jobs.explain(self.api, view)
            raise UsageError(
                f"job {job.job} has no log yet" + (f": {reasons[0].text}" if reasons else ""),
                hint=f"spr-cluster jobs {job.job} {self.flags}".rstrip(),
            )
        read_log(self.api, pod, on_text, _warn)

    def can_cancel(self, job: JobSummary) -> bool:
        """Delete even an ended job, to free its name."""
        return job.state != DELETED

    def cancel(self, job: JobSummary, on_log: Show, *, now: bool) -> tuple[str, ...]:
        """Delete a job, whose pods have 120 s for a checkpoint. Its files stay on the claim."""
        jobs.delete_job(self.api, jobs.require_job(self.api, job.job), on_log, at_once=now)
        return ()

    def choose_claim(self, job: JobSummary) -> str:
        """Return a job's claim. Raises :class:`UsageError` if others use it."""
        view = jobs.require_job(self.api, job.job)
        if view.claim and (users := jobs.find_claim_users(self.api, view)):
            raise UsageError(
                f"claim {view.claim} is also that of {', '.join(users)}; nothing was deleted",
                hint="cancel those first, or omit --claim",
            )
        return view.claim

    def delete_claim(self, name: str, on_wait: Show) -> None:
        jobs.delete_claim(self.api, name, on_wait)

    def fetch(
        self, job: str, results: Path, note: Show, *, all_checkpoints: bool = False
    ) -> Fetched:
        """Download a job's files from its claim, through a small pod that is deleted at the end."""
        view, known = jobs.find_job(self.api, job), self.submitted
        spec = view.spec if view else {}
        if known and known.pull_secret:
            spec = {**spec, "imagePullSecrets": [{"name": known.pull_secret}]}
        claim = (known and known.claim) or (view and view.claim)
        image = (known and known.image) or (view and view.image)
        if not (claim and image):
            raise UsageError(
                f"job {job} has no claim of ours", hint="--claim and --image name them"
            )
        reader = ResultsReader(self.api, job, claim, image, spec, note, _warn)
        holder = reader.find_holder()
        claim_results(results, job)
        reader.fetch(holder, results)
        if view is None:
            return Fetched()
        record = describe_record(view, self.api.context, self.api.namespace)
        write_record_text(results, json.dumps(record, indent=1) + "\n")
        pod = view.pod(0)
        missing = self._fetch_log(pod, own_folder(results) / "log", note) if pod else ()
        return Fetched(missing)

    def _fetch_log(self, pod: PodView, target: Path, note: Show) -> tuple[str, ...]:
        with target.open("w", encoding="utf-8") as file:
            try:
                read_log(self.api, pod, lambda line: print(line, file=file), note)
            except KubernetesError as error:
                return (f"the log is incomplete: {error.message}",)
        return ()

    def explain_loss(self, job: str, error: SprError) -> SprError | None:
        """Return an error that is the cluster's answer; without an answer, the job may still be running."""
        return error if isinstance(error, KubernetesError) and error.status else None

    def _summarize(self, view: JobView) -> JobSummary:
        problems = jobs.explain(self.api, view) if view.state in (QUEUED, FAILED) else []
        first = problems[0] if problems else None
        more = f" (and {counted(len(problems) - 1, 'other reason')})" if problems[1:] else ""
        why = f"{first.text}{more}" if first else ""
        began, ended = find_times(view)
        codes = [code for pod in view.pods if (code := exit_code(pod)) is not None]
        is_over = view.state in (SUCCEEDED, FAILED)
        return JobSummary(
            view.state,
            exit_code=next(filter(None, codes), 0 if codes else None) if is_over else None,
            began=began,
            ended=ended if is_over else None,
            nodes=tuple(pod.node for pod in view.pods if pod.node),
            message=why if view.state == FAILED and why else None,
            job=view.name,
            submitted=view.created or datetime.fromtimestamp(0, timezone.utc),
            waits_for=why if view.state == QUEUED else "",
            fix=first.fix if first else "",
            ranks_per_node=view.node_ranks,
        )


def _describe_pod(pod: PodView) -> dict[str, Any]:
    return {
        "name": pod.name,
        "phase": pod.phase,
        "node": pod.node or None,
        "restarts": pod.restarts,
        "exit_code": exit_code(pod),
    }


def _warn(text: object) -> None:
    print(text, file=sys.stderr)
