"""The embedded cloud's background process: moto's EC2, SSM and STS on a loopback port.

`python -m infra.local.server FOLDER REGION` loads the saved state, starts what it says, answers on
a port of 127.0.0.1, and returns once it does: the process itself goes on in the background.
"""

from __future__ import annotations

import fcntl
import functools
import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs

from infra.errors import CloudError, SprError
from infra.local.base_image import BaseImage
from infra.local.engine import open_engine
from infra.local.host import gateway_of, node_mounts
from infra.local.nodes import Nodes
from infra.local.state import (
    STATUS_PATH,
    ServerAddress,
    StateFolder,
    load_snapshot,
    save_snapshot,
)

ACCOUNT = "123456789012"
_WATCH_S = 0.5
_READS = ("Describe", "Get", "List")

StartResponse = Callable[..., Any]


class Application:
    """The WSGI application: one request at a time, and nothing is answered before it is saved."""

    def __init__(self, nodes: Nodes, folder: StateFolder) -> None:
        from moto.ec2.models import ec2_backends
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        from infra.local.ec2 import LocalEC2Backend, hide_invented_addresses

        hide_invented_addresses()
        self._regions = ec2_backends[ACCOUNT]
        self._regions.backend = functools.partial(LocalEC2Backend, nodes=nodes)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._nodes = nodes
        self._folder = folder
        self._open: set[str] = set()
        self.lock = threading.RLock()

    def load(self, *, suspended: bool) -> None:
        """Take up the saved state; raises :class:`CloudError` where it can't be read."""
        for region, backend in load_snapshot(self._folder).items():
            self._regions[region] = backend
            backend.resume(self._nodes, suspended=suspended)
        self.save()

    def open_region(self, region: str) -> None:
        """Set up a region's EC2: its network, and Ubuntu's image in its parameter store."""
        if region not in self._open:
            # moto makes it, and with it the network, when it is first looked at.
            self._regions[region]
            publish_image_parameters(region, self._nodes.base.ami_id)
            self.save()
            self._open.add(region)

    def save(self) -> None:
        save_snapshot(self._folder, dict(self._regions))

    def reconcile(self) -> None:
        """Take note of what the nodes did by themselves; it must not keep a request from its answer."""
        try:
            changed = [backend.reconcile() for backend in list(self._regions.values())]
        except Exception:
            logging.exception("keeping up with the nodes")
        else:
            if any(changed):
                self.save()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        with self.lock:
            if path == STATUS_PATH:
                return self._answer_status(environ, start_response)
            if path.startswith("/moto-api"):
                # It would wipe the state and leave the containers.
                start_response("404 Not Found", [("Content-Length", "0")])
                return [b""]
            action = read_action(environ)
            self.reconcile()
            answer = list(self._moto(environ, start_response))
            if not action.startswith(_READS):
                self.save()
            return answer

    def _answer_status(
        self, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        region = parse_qs(environ.get("QUERY_STRING", "")).get("region", [""])[0]
        try:
            if region:
                self.open_region(region)
        except KeyError:
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        body = json.dumps(
            {
                "pid": os.getpid(),
                "gateways": {r: gateway_of(b.vpc_range) for r, b in self._regions.items()},
            }
        ).encode()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [body]


def read_action(environ: dict[str, Any]) -> str:
    """The name of the API call; the request's body stays readable."""
    if target := environ.get("HTTP_X_AMZ_TARGET", ""):
        return str(target).rsplit(".", 1)[-1]
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length)
    environ["wsgi.input"] = io.BytesIO(body)
    values = parse_qs(body.decode("utf-8", "replace")) or parse_qs(environ.get("QUERY_STRING", ""))
    return str(values.get("Action", [""])[0])


def publish_image_parameters(region: str, ami_id: str) -> None:
    """Answer the base image where Canonical publishes Ubuntu's; users can't write below `/aws`."""
    from moto.core.utils import utcnow
    from moto.ssm.models import Parameter, ssm_backends

    parameters = ssm_backends[ACCOUNT][region]._parameters
    for release, disk in (("24.04", "gp3"), ("22.04", "gp2"), ("20.04", "gp2")):
        name = f"/aws/service/canonical/ubuntu/server/{release}/stable/current/amd64/hvm/ebs-{disk}/ami-id"
        parameters[name] = [
            Parameter(
                account_id=ACCOUNT,
                name=name,
                value=ami_id,
                parameter_type="String",
                description=None,
                allowed_pattern=None,
                keyid=None,
                last_modified_date=utcnow(),
                version=1,
                data_type="aws:ec2:image",
            )
        ]


def watch(application: Application, stop: threading.Event) -> None:
    """Notice within half a second what nodes do by themselves."""
    while not stop.wait(_WATCH_S):
        with application.lock:
            application.reconcile()


def hold_lock(folder: StateFolder) -> IO[str]:
    """Hold the lock that says that the server lives, as long as the file is open."""
    file = folder.server_lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CloudError("another server has this embedded cloud") from None
    return file


def bind(application: Application, folder: StateFolder) -> Any:
    """A server on the port of last time, else on a free one."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    last = ServerAddress.read(folder)
    for port in [last.port] if last else []:
        try:
            return _make(make_server, port, application, MotoRequestHandler)
        except (OSError, SystemExit):
            logging.info("port %d is taken", port)
    return _make(make_server, 0, application, MotoRequestHandler)


def _make(make_server: Any, port: int, application: Application, handler: Any) -> Any:
    return make_server("127.0.0.1", port, application, threaded=True, request_handler=handler)


def serve(server: Any, application: Application) -> None:
    """Serve until the end of the process; SIGTERM waits for the request in hand."""

    def end(_signal: int, _frame: object) -> None:
        application.lock.acquire(timeout=30)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(
        target=watch, args=(application, threading.Event()), name="watch", daemon=True
    ).start()
    server.serve_forever()


def main(argv: list[str]) -> int:
    folder, region = StateFolder(Path(argv[0])), argv[1]
    base = BaseImage(argv[2], argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lock = hold_lock(folder)
    nodes = Nodes(open_engine(folder.root), folder, base, node_mounts(folder.pip_conf))
    application = Application(nodes, folder)
    application.load(suspended=folder.suspended.exists())
    application.open_region(region)
    folder.suspended.unlink(missing_ok=True)
    server = bind(application, folder)
    if child := os.fork():
        # Whoever started us sees that the cloud is ready; the child has the lock and the port.
        ServerAddress(child, server.port).write(folder)
        os._exit(0)
    os.setsid()
    os.chdir("/")
    with lock:
        serve(server, application)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SprError as failure:
        sys.exit(f"error: {failure.message}")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
