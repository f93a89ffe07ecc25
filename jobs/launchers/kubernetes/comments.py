"""A manifest as YAML, with comments that say why it is as it is. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from jobs.launchers.kubernetes.manifests import AMX_LABEL, HUB_TOKEN
from jobs.launchers.kubernetes.pod_size import PodSize
from jobs.launchers.kubernetes.request import CLAIM_PATH, PodOptions
from jobs.launchers.node_shape import NodeShape
from jobs.launchers.placement import Placement

_WIDTH = 100
# A key, or an item of a list by its name.
_LINE = re.compile(r"( *)(?:- name: (\S+)$|([\w./-]+):)")
CLAIM_COMMENTS = {
    "accessModes": "Pods on several nodes use it at once: the storage class must offer ReadWriteMany, as "
    "NFS, CephFS, EFS, Filestore, and Azure Files do. Block storage can only serve one node.",
}
_REFERENCE = {
    "spec": "The job of https://huggingface.co/docs/transformers/v4.49.0/en/perf_train_cpu_many, corrected. "
    "Corrected: it has no elasticPolicy. The original's (minReplicas 1, c10d, 10 restarts) also trains "
    "with one worker, with another global batch and thus another result.",
    "numProcPerNode": "Corrected: the original leaves it out, and it becomes the number of CPUs.",
    "image": "Corrected: built from pinned packages. The original's "
    "huggingface/transformers-pytorch-cpu:latest is another one every time.",
    "command": "Corrected: oneCCL's environment is loaded before the ranks start. The original leaves "
    "out what its own section on bare metal requires.",
    "args": "Corrected: the output goes to a folder of this job, where a restarted pod finds its "
    "checkpoint. The original's folder is the same for all jobs.",
    "LD_PRELOAD": "Corrected: a name that the image makes. The original's libtcmalloc.so.4.5.9 is that of "
    "one release, and its libiomp5.so of one image; a missing library is skipped with a warning.",
    "OMP_NUM_THREADS": "Corrected: the original has 23 threads per rank and 200 CPUs per pod, whatever the "
    "node.",
    "CCL_ATL_TRANSPORT": "Corrected: oneCCL's default is MPI, but torchrun starts the ranks, not mpirun.",
    "CCL_PROCESS_LAUNCHER": "Likewise: oneCCL would ask mpirun for the ranks' places.",
    "HF_HOME": "Corrected: one variable instead of TRANSFORMERS_CACHE, which is deprecated, and "
    "HF_DATASETS_CACHE.",
    AMX_LABEL: "Corrected: node-feature-discovery sets this label where the processor has AMX. The "
    "original's node-type: spr is set by hand.",
    "shm": "Corrected: with a limit. Without one it may grow to half of the node's memory, and the pod is "
    "killed before that.",
    "restartPolicy": "Corrected: the replica's policy overrides the pod's, so there is only this one; the "
    "original also has Never in the pod.",
}


def job_comments(
    pods: PodOptions, placement: Placement, size: PodSize, *, reference: bool
) -> dict[str, str]:
    """Return the comments of a job's manifest, by the keys that they explain."""
    placed = _describe_placement(pods.shape, placement, size)
    comments = {
        "numProcPerNode": "Unset, it would become the number of CPUs.",
        "runtimeRef": "Part of Kubeflow Trainer. Its own image is for CUDA.",
        "image": "Built from the Dockerfile; pushed to a registry that the nodes reach.",
        "args": "A restarted pod resumes from the newest checkpoint of this output folder.",
        "LD_PRELOAD": "tcmalloc, by a name that the image makes.",
        "OMP_NUM_THREADS": "",
        "command": "oneCCL's environment is loaded before the ranks start.",
        "CCL_ATL_TRANSPORT": "Not MPI: torchrun starts the ranks, not mpirun.",
        "CCL_PROCESS_LAUNCHER": "Likewise: oneCCL would ask mpirun for the ranks' places.",
        "HF_HOME": "The hub's models and data are kept on the claim.",
        HUB_TOKEN: "For models and data of the hub that need a login.",
        AMX_LABEL: "Set by node-feature-discovery where the processor has AMX.",
        "shm": "For oneCCL and other libraries; part of the pod's memory. The runtime's own has 64 MiB.",
        "restartPolicy": "It overrides a policy in the pod's own specification.",
    }
    comments |= _REFERENCE if reference else {}
    comments["OMP_NUM_THREADS"] = f"{placed} {comments['OMP_NUM_THREADS']}".strip()
    comments |= {
        "limits": "Equal to the requests, in whole CPUs: QoS class Guaranteed, so that a node with the "
        "static CPU manager gives the pod cores of its own. "
        f"The rest of {pods.shape.memory_gib} GiB is for the system, kubelet, and its eviction threshold.",
        "terminationGracePeriodSeconds": "Time for a checkpoint after a request to stop.",
        "workspace": f"Holds {CLAIM_PATH}/data, the hub's cache, and {pods.folder}.",
        "seccompProfile": "With this and the container's settings, the pod meets the Pod Security level "
        "restricted.",
        "automountServiceAccountToken": "The job does not call the cluster's API.",
        "fsGroup": "So that the image's user may write to the claim. Not all kinds of storage obey.",
    }
    if placement.backend != "ccl":
        del comments["command"]
    comments["nprocPerNode"] = comments["numProcPerNode"]
    return comments


def _describe_placement(shape: NodeShape, placement: Placement, size: PodSize) -> str:
    ranks, threads, workers = (
        placement.nproc_per_node,
        placement.omp_threads,
        placement.ccl_workers,
    )
    each = f"({threads} + {workers} for oneCCL)" if workers else str(threads)
    return (
        f"{ranks} x {each} = {ranks * (threads + workers)} of a node's {shape.cores} cores, "
        f"{size.cpus} CPUs with {shape.threads_per_core} to a core; the others are for the node itself. "
        "Each rank finds the pod's cores and takes its own."
    )


class _Dumper(yaml.SafeDumper):
    """Repeats what appears twice, and writes a text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def render_yaml(manifest: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return the manifest as YAML. ``comments`` are by key, or by ``name`` in a list; each appears once,
    above the first place that it is about."""
    left, lines = dict(comments), []
    for line in yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=_WIDTH).splitlines():
        found = _LINE.match(line)
        if found and (comment := left.pop(found[2] or found[3], "")):
            indent = f"{found[1]}# "
            width = _WIDTH - len(indent)
            text = textwrap.fill(comment, width, break_on_hyphens=False, break_long_words=False)
            lines.append(textwrap.indent(text, indent))
        lines.append(line)
    return "\n".join([*lines, ""])
