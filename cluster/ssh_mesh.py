"""Connects the nodes with SSH, as in the reference recipe, and Slurm (:mod:`cluster.slurm.configuration`).

Each node gets a new shared key, ``~/.ssh/config``, names in ``/etc/hosts``, and ``~/hosts`` for mpirun.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Mapping, Sequence

from cluster.nodes import Cluster, HostOpener, Node
from cluster.slurm import configuration
from infra.ec2.key_pair import KeyPair, generate_key_pair
from provision.facts import HostFacts
from provision.host import SSH_USER, Host
from provision.jump import proxy_argv
from provision.run_on_nodes import on_all

_KEY = ".ssh/spr-cluster"
_BEGIN, _END = "# spr-cluster begin", "# spr-cluster end"
_BUNDLE = "/tmp/spr-cluster-mesh.tar"

# Copied in place, because /etc/hosts can't be replaced where it is a mount. A hostname must not be a loopback
# address as well: its node would use that.
PUT_NAMES = (
    f'(cat; sed -E "/^{_BEGIN}$/,/^{_END}$/d; '
    r'/^127\./s/[[:space:]]+$(hostname)([[:space:]]|$)/\1/g" /etc/hosts) > /tmp/spr-cluster-hosts && '
    "sudo cp --no-preserve=all /tmp/spr-cluster-hosts /etc/hosts"
)
"""The shell command that puts our part of /etc/hosts, from standard input, before the rest."""
_UNPACK = f"""set -e
umask 077
tar -C "$HOME" -xf {_BUNDLE}
rm -f {_BUNDLE}
touch ~/.ssh/authorized_keys
keys=~/.ssh/authorized_keys
{{ grep -v ' spr-cluster-nodes$' $keys || true; cat ~/{_KEY}.pub; }} > $keys.new
mv $keys.new $keys
chmod 644 ~/hosts
cat ~/.spr-cluster-hosts | {PUT_NAMES} || exit 1
rm -f ~/.spr-cluster-hosts /tmp/spr-cluster-hosts
{configuration.CONFIGURE}"""


def render_ssh_config(nodes: Sequence[Node]) -> str:
    """Render every node's ``~/.ssh/config``: names, no prompts, and strict host key checking."""
    blocks = [
        f"Host {node.name}\n    HostName {node.private_ip}\n    HostKeyAlias {node.name}"
        for node in nodes
    ]
    common = (
        "Host node*\n"
        f"    User {SSH_USER}\n"
        f"    IdentityFile ~/{_KEY}\n"
        "    IdentitiesOnly yes\n"
        "    BatchMode yes\n"
        "    ConnectTimeout 20\n"
        # A connection to a lost node breaks after 45 s; otherwise mpirun would wait forever.
        "    ServerAliveInterval 15\n"
        "    ServerAliveCountMax 3\n"
        "    TCPKeepAlive yes\n"
        "    StrictHostKeyChecking yes\n"
        "    LogLevel ERROR\n"
        # OpenSSH's default key exchange takes 50 ms longer.
        "    KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org"
    )
    return "\n\n".join([*blocks, common]) + "\n"


def render_client_ssh_config(
    cluster: Cluster, key: str, known_hosts: str, region: str, prefix: str = ""
) -> str:
    """Render the local SSH configuration for `ssh -F`, with the nodes by name after ``prefix``."""
    blocks = []
    for node in cluster.nodes:
        id_ = node.instance.id
        block = f"Host {prefix}{node.name}\n    HostName {node.address}\n    HostKeyAlias {id_}"
        if node.jump and node.rank:
            block += f"\n    ProxyJump {prefix}{cluster.head.name}"
        elif proxy := proxy_argv(node.jump, id_, node.address, region):
            block += f"\n    ProxyCommand {shlex.join(proxy)}"
        blocks.append(block)
    # In the user's configuration, a pattern could fit other machines.
    hosts = " ".join(prefix + node.name for node in cluster.nodes) if prefix else "node*"
    common = (
        f"Host {hosts}\n"
        f"    User {SSH_USER}\n"
        f'    IdentityFile "{key}"\n'
        f'    UserKnownHostsFile "{known_hosts}"\n'
        "    IdentitiesOnly yes\n"
        # As :class:`provision.ssh.SshHost` does: a colleague's machine has not connected to the nodes before.
        "    StrictHostKeyChecking accept-new\n"
        # It reads the same file.
        "    HashKnownHosts no\n"
        # The nodes do not need the keys of an agent that the user forwards elsewhere.
        "    ForwardAgent no\n"
        "    ConnectTimeout 20\n"
        "    ServerAliveInterval 20\n"
        "    ServerAliveCountMax 3"
    )
    return "\n\n".join([*blocks, common]) + "\n"


def bundle_mesh(cluster: Cluster, facts: Mapping[str, HostFacts], key: KeyPair) -> bytes:
    """Return the files a node needs to work with the others, as a tar archive of its home folder."""
    nodes = cluster.nodes
    known = [f"{n.name},{n.private_ip} {facts[n.name].host_key}\n" for n in nodes]
    places = [f"{n.private_ip} {n.name} {facts[n.name].hostname}" for n in nodes]
    files = {
        _KEY: key.private,
        f"{_KEY}.pub": key.public + "\n",
        ".ssh/config": render_ssh_config(nodes),
        ".ssh/known_hosts": "".join(known),
        # For mpirun, head first; the names resolve to private addresses.
        "hosts": "".join(f"{node.name}\n" for node in nodes),
        # Our part of /etc/hosts: each node's address, its name, and its hostname.
        ".spr-cluster-hosts": "\n".join([_BEGIN, *places, _END, ""]),
    }
    contents = {name: text.encode() for name, text in files.items()}
    contents |= configuration.slurm_files(cluster.name, nodes, facts)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def connect_nodes(cluster: Cluster, facts: Mapping[str, HostFacts], open_host: HostOpener) -> None:
    """Connect the nodes by name and configure Slurm, with new keys that only the nodes store."""
    bundle = bundle_mesh(cluster, facts, generate_key_pair("spr-cluster-nodes"))

    def place(host: Host) -> None:
        host.put(bundle, _BUNDLE)
        host.run(_UNPACK)

    on_all("connecting the nodes", [open_host(node) for node in cluster.nodes], place)
