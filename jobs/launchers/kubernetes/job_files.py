"""From a request to everything that a job on Kubernetes consists of: image, claim, and job. Pure.

:func:`render` is the seam to clients: they submit the dicts that ``render k8s`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.launchers.kubernetes.comments import CLAIM_COMMENTS, job_comments, render_yaml
from jobs.launchers.kubernetes.image import build_files, find_preloads
from jobs.launchers.kubernetes.manifests import Manifest, render_claim, render_job
from jobs.launchers.kubernetes.pod_size import PodSize, place_pod
from jobs.launchers.kubernetes.request import PodOptions
from jobs.launchers.placement import Placement
from jobs.launchers.plan import JobPlan
from provision.stacks.stack import Stack


@dataclass(frozen=True)
class Rendered:
    """A job on Kubernetes. ``claim`` is ``None`` if the job uses one that exists."""

    plan: JobPlan
    pods: PodOptions
    placement: Placement
    size: PodSize
    claim: Manifest | None
    job: Manifest
    build: Mapping[str, Path | bytes]
    """The files of the folder from which the image is built."""

    @property
    def manifests(self) -> list[Manifest]:
        """What to create, in this order."""
        return [each for each in (self.claim, self.job) if each is not None]

    @property
    def dockerfile(self) -> str:
        text = self.build["Dockerfile"]
        assert isinstance(text, bytes)
        return text.decode()

    def yaml_files(self) -> dict[str, str]:
        """Return the manifests as commented YAML, by file name."""
        reference = self.plan.module == "worker.program"
        comments = job_comments(self.pods, self.placement, self.size, reference=reference)
        claim = {"claim.yaml": render_yaml(self.claim, CLAIM_COMMENTS)} if self.claim else {}
        return {**claim, "job.yaml": render_yaml(self.job, comments)}


def render(plan: JobPlan, pods: PodOptions, stack: Stack) -> Rendered:
    """Return a plan's image, claim, and job. Raises :class:`UsageError` for nodes that don't fit it."""
    placement, size = place_pod(pods.shape, plan.placement, plan.backend, find_preloads(stack))
    return Rendered(
        plan=plan,
        pods=pods,
        placement=placement,
        size=size,
        claim=render_claim(pods),
        job=render_job(plan, placement, size, pods, stack),
        build=build_files(stack, pods.image),
    )
