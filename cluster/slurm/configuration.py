"""Slurm on the nodes: its configuration, and the key that its daemons trust one another by."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from importlib import resources

from cluster.nodes import Node
from provision import on_node
from provision.facts import HostFacts
from provision.host import SSH_USER
from provision.on_node.keeper import ENDED_JOBS

FOLDER = ".spr-cluster-slurm"
"""In the login user's home, while a node is being configured."""
PARTITION = "cluster"
_KEY_BYTES = 1024
_MEMORY_SHARE = 0.95
"""The rest is for the system."""
_SCRIPTS = (
    *("configure.sh", "epilog.sh", "health.sh", "task_prolog.sh"),
    *("munge.conf", "slurmctld.conf", "slurmd.conf"),
)

CONFIGURE = f"sudo sh ~/{FOLDER}/configure.sh\nrm -rf ~/{FOLDER}\n"
"""Shell commands for a node that has the files."""

# Every option exists in Slurm 19.05 (Ubuntu 20.04) to 24.11 (Debian 13), and none is deprecated there.
_SETTINGS = f"""\
# Written by spr-cluster whenever it connects the nodes.
AuthType=auth/munge
# Slurm waits twice this long before it uses a dead node's jobs again; its default is 120 s.
AuthInfo=cred_expire=15
SlurmUser=slurm
StateSaveLocation={ENDED_JOBS.parent}

# A job gets the cores and the memory that it asks for, by default a core; of few NUMA nodes, which are
# Slurm's sockets.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory,CR_CORE_DEFAULT_DIST_BLOCK
# Slurm counts fewer CPUs in a container than the node has; it must not drain the node for that.
SlurmdParameters=config_overrides
# proctrack/cgroup needs control groups v1 on Ubuntu 22.04, whose Slurm is older than their v2; task/affinity
# has not been tried on AWS.
# mpirun pins its ranks itself, and the epilog ends what the process tree does not show.
ProctrackType=proctrack/linuxproc
Epilog=/etc/slurm/spr-cluster-epilog
# It keeps jobs on their cores, and limits their memory.
TaskProlog=/etc/slurm/spr-cluster-task-prolog
# Jobs get the nodes' limits, not those of the shell that submits them.
PropagateResourceLimits=NONE

SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
# A node that is silent for so many seconds is down, and its jobs start again elsewhere. In fact slurmd may
# be frozen for 14 s, and not for 25 s. With 40 processes starting and 4 GB written with fsync on two shared
# cores, it answered within 2.4 s (measured on the embedded cloud).
SlurmdTimeout=10
ReturnToService=2
JobRequeue=1
KillWait=30
# It takes a node out of the queue before EC2 takes the node, and while its disk is full.
HealthCheckProgram=/etc/slurm/spr-cluster-health
HealthCheckInterval=5
HealthCheckNodeState=ANY

# Ended jobs stay in `scontrol show job` for an hour, and in this file forever.
MinJobAge=3600
JobCompType=jobcomp/filetxt
JobCompLoc={ENDED_JOBS}
"""


def render_slurm_conf(name: str, nodes: Sequence[Node], facts: Mapping[str, HostFacts]) -> str:
    """Render ``slurm.conf``, which is the same on every node. ``facts`` are by node name."""
    head = nodes[0]
    place = f"ClusterName={name}\nSlurmctldHost={facts[head.name].hostname}({head.private_ip})\n"
    lines = [_render_node(node, facts[node.name]) for node in nodes]
    partition = f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO"
    # By the login user's own group: AllowAccounts would need a database.
    limits = f"AllowGroups={SSH_USER} State=UP"
    # A job that does not say how much memory it needs gets its cores' share.
    share = min(usable_memory(each) // len(each.physical_cores) for each in facts.values())
    return "\n".join([place + _SETTINGS, *lines, f"{partition} DefMemPerCPU={share} {limits}", ""])


def usable_memory(facts: HostFacts) -> int:
    """Return the MiB of a node's memory that jobs can have."""
    return int(facts.memory_total // 1024 * _MEMORY_SHARE)


def order_cores(facts: HostFacts) -> list[list[int]]:
    """Return a node's physical cores in Slurm's order: each core's NUMA node and CPUs."""
    cpus: dict[tuple[int, int], list[int]] = {}
    for cpu in facts.cpus:
        cpus.setdefault((cpu.socket, cpu.core), []).append(cpu.cpu)
    groups = facts.cores_by_numa_node
    return [[c.node, *sorted(cpus[c.socket, c.core])] for group in groups for c in group]


def find_sockets(facts: HostFacts) -> tuple[int, int]:
    """Return the number of sockets that Slurm sees (equal NUMA nodes are sockets), and each one's cores."""
    sizes = [len(group) for group in facts.cores_by_numa_node]
    return (len(sizes), sizes[0]) if len({*sizes}) == 1 else (1, sum(sizes))


def _render_node(node: Node, facts: HostFacts) -> str:
    # Two jobs on the threads of one core would slow each other down: Slurm knows only cores.
    sockets, each = find_sockets(facts)
    shape = {"CPUs": sockets * each, "Sockets": sockets, "CoresPerSocket": each}
    shape |= {"ThreadsPerCore": 1, "RealMemory": usable_memory(facts)}
    described = " ".join(f"{key}={value}" for key, value in shape.items())
    # For configure.sh: a replacement may have the address, and so the host name, of the lost machine.
    machine = f"# {node.name} {node.instance.id}"
    place = f"NodeHostname={facts.hostname} NodeAddr={node.private_ip}"
    return f"{machine}\nNodeName={node.name} {place} {described}"


def slurm_files(
    name: str, nodes: Sequence[Node], facts: Mapping[str, HostFacts]
) -> dict[str, bytes]:
    """Return the files that configure Slurm on a node, by their paths in its home; the key is new."""
    folder = resources.files("cluster").joinpath("slurm", "files")
    files = {script: folder.joinpath(script).read_bytes() for script in _SCRIPTS}
    files |= {"slurm.conf": render_slurm_conf(name, nodes, facts).encode()}
    files |= {"munge.key": secrets.token_bytes(_KEY_BYTES)}
    files |= {"limits.py": resources.files(on_node).joinpath("limits.py").read_bytes()}
    cores = {node.name: order_cores(facts[node.name]) for node in nodes}
    files |= {"cores.json": json.dumps(cores).encode()}
    return {f"{FOLDER}/{file}": content for file, content in files.items()}
