"""What the server offers inside each node: S3, and its role's credentials in the instance metadata."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from infra.local.api.bucket_server import BucketServer
from infra.local.machines.inside import METADATA, S3_PORT, listen_inside, write_aws_config

_RENEW_S = 3600


class NodeServices:
    """Follows the running nodes; nothing of it is saved."""

    def __init__(self, buckets: BucketServer) -> None:
        self._buckets = buckets
        self._servers: dict[int, Any] = {}
        self._ready: set[int] = set()
        self._renewed: dict[str, float] = {}

    def follow(self, backends: list[Any]) -> None:
        """Serve new nodes, and no longer those that have ended."""
        pids = {pid: ec2 for ec2 in backends for pid in ec2.lifecycle.pids.values() if pid}
        for pid in self._servers.keys() - pids.keys():
            server = self._servers.pop(pid)
            self._ready.discard(pid)
            threading.Thread(target=_close, args=(server,), daemon=True).start()
        for pid, ec2 in pids.items():
            if pid not in self._servers:
                self._servers[pid] = _serve(pid, partial(self._buckets, region=ec2.region_name))
            if pid not in self._ready and write_aws_config(pid):
                self._ready.add(pid)
        for ec2 in backends:
            self._renew(ec2)

    def _renew(self, ec2: Any) -> None:
        """Write new credentials into the metadata of instances with a role, long before they expire."""
        now = ec2.runtime.now()
        for id_, profile in ec2.lifecycle.profiles.items():
            if id_ not in ec2.lifecycle.pids or now - self._renewed.get(id_, 0) < _RENEW_S:
                continue
            found = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.get(profile)
            for role in found.roles if found else ():
                text = self._buckets.sessions.render(profile, id_, now)
                name = f"iam/security-credentials/{role.name}"
                ec2.runtime.containers.write_metadata(id_, name, text)
                self._renewed[id_] = now


def _serve(pid: int, application: Any) -> Any:
    try:
        listener = listen_inside(pid, METADATA, S3_PORT)
    except OSError as error:
        # The node may be ending.
        logging.warning("no S3 in process %d: %s", pid, error)
        return None
    server = make_server(
        METADATA,
        S3_PORT,
        application,
        threaded=True,
        request_handler=MotoRequestHandler,
        fd=listener.detach(),
    )
    threading.Thread(target=server.serve_forever, name=f"s3-{pid}", daemon=True).start()
    return server


def _close(server: Any) -> None:
    if server is not None:
        server.shutdown()
        server.server_close()
