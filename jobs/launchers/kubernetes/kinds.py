"""TrainJob and PyTorchJob: where a cluster's API has them, and how their pods name their job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKind:
    """A kind of job. ``api`` is its group and version; ``install`` makes a cluster serve it."""

    name: str
    api: str
    plural: str
    pod_label: str
    install: str

    @property
    def resource(self) -> str:
        """Its name in roles and quotas."""
        return f"{self.plural}.{self.api.partition('/')[0]}"

    @property
    def create_right(self) -> str:
        return f"create {self.resource}"

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of the jobs of a namespace, or of one of them."""
        return f"/apis/{self.api}/namespaces/{namespace}/{self.plural}" + (
            f"/{name}" if name else ""
        )


TRAIN_JOB = JobKind(
    "TrainJob",
    "trainer.kubeflow.org/v1alpha1",
    "trainjobs",
    "jobset.sigs.k8s.io/jobset-name",
    "Kubeflow Trainer 2.2 or newer",
)
PYTORCH_JOB = JobKind(
    "PyTorchJob",
    "kubeflow.org/v1",
    "pytorchjobs",
    "training.kubeflow.org/job-name",
    "Kubeflow training-operator 1.x",
)
JOB_KINDS = {kind.name: kind for kind in (TRAIN_JOB, PYTORCH_JOB)}
"""The preferred one first."""
