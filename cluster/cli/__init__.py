"""Commands on clusters: up, verify, status, down, and others; :mod:`jobs.cli` adds those on jobs."""

from cluster.console.parser import Command

GROUPS: dict[str, dict[str, Command]] = {
    "cluster": {
        "up": Command("cluster.cli.up", "create, install, connect, and verify a cluster"),
        "status": Command("cluster.cli.status", "show a cluster's nodes, cost, and time left"),
        "verify": Command("cluster.cli.verify", "check every node and the network between them"),
        "repair": Command("cluster.cli.up", "replace dead or unhealthy nodes"),
        "ssh": Command("cluster.cli.ssh", "open a shell on a node"),
        "cp": Command("cluster.cli.cp", "copy files to a node or from it"),
        "extend": Command("cluster.cli.down", "extend a cluster's time to live"),
        "down": Command("cluster.cli.down", "remove everything, and verify that it is gone"),
    },
    "software": {
        "stacks": Command("cluster.cli.stacks", "list, check, and lock software stacks"),
        "images": Command("cluster.cli.images", "list and delete images"),
    },
    "upkeep": {
        "list": Command("cluster.cli.list", "show all clusters, with age and cost so far"),
        "gc": Command("cluster.cli.list", "find forgotten clusters and remove them"),
        "events": Command("cluster.cli.events", "show what was done to a cluster, and why"),
        "types": Command("cluster.cli.types", "compare instance types by what the same work costs"),
        "iam-policy": Command("cluster.cli.iam_policy", "print the least IAM policy required"),
        "local": Command("cluster.cli.local", "manage the embedded cloud on this machine"),
    },
}
"""The commands by the groups in which ``spr-cluster --help`` lists them."""
