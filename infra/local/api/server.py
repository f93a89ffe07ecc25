"""The embedded cloud's background process: moto's EC2, SSM, and STS, and S3, on a loopback port.

`python -m infra.local.api.server FOLDER REGION BASE_IMAGE DESCRIPTION` loads the saved state, starts its
nodes, opens a port on 127.0.0.1, and returns while a child process continues as the server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from infra.errors import SprError
from infra.files import read_text
from infra.local.api.application import Application
from infra.local.machines.base_image import BaseImage
from infra.local.machines.containers import NodeContainers
from infra.local.machines.host import node_mounts
from infra.local.machines.podman import open_podman
from infra.local.state import ServerAddress, StateFolder

_WATCH_S = 0.5


def watch(application: Application) -> None:
    """Reconcile every half second with what the nodes do themselves, and save S3's changes."""
    while not threading.Event().wait(_WATCH_S):
        try:
            with application.lock:
                application.reconcile()
            application.buckets.save_changes()
        except Exception:
            logging.exception("watching the nodes")


def bind(application: Application, folder: StateFolder) -> Any:
    """Return a server on the last server's port if it is free, else on any free port."""

    def listen(port: int) -> Any:
        return make_server(
            "127.0.0.1", port, application, threaded=True, request_handler=MotoRequestHandler
        )

    if last := ServerAddress.read(folder):
        try:
            return listen(last.port)
        except (OSError, SystemExit):
            logging.info("port %d is taken", last.port)
    return listen(0)


def serve(server: Any, application: Application) -> None:
    """Serve until SIGTERM, which lets the current request finish, and ends no server with unsaved buckets."""

    def end(_signal: int, _frame: object) -> None:
        has_finished = application.lock.acquire(timeout=30)
        try:
            # No request may change a bucket after it has been saved.
            with application.buckets.lock:
                application.buckets.save()
                os._exit(0)
        except Exception:
            logging.exception("saving the buckets before the end")
        if has_finished:
            application.lock.release()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, args=(application,), name="watch", daemon=True).start()
    server.serve_forever()


def application_type() -> type[Application]:
    """Return the class of the application; tests name the folder and module of a stricter one."""
    folder, _, module = os.environ.get("SPR_CLUSTER_LOCAL_APPLICATION", "").rpartition(":")
    if not module:
        return Application
    sys.path.append(folder)
    found: type[Application] = import_module(module).FaultyApplication
    return found


def main(argv: list[str]) -> int:
    folder, region = StateFolder(Path(argv[0])), argv[1]
    base = BaseImage(argv[2], argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    containers = NodeContainers(
        open_podman(folder.root), folder, base, node_mounts(folder.pip_conf)
    )
    application = application_type()(containers, folder)
    application.load(suspended=read_text(folder.suspended, "").splitlines())
    application.open_region(region)
    folder.suspended.unlink(missing_ok=True)
    server = bind(application, folder)
    if child := os.fork():
        # The caller now knows that the cloud is ready; the child has the port.
        ServerAddress(child, server.port).write(folder)
        os._exit(0)
    os.setsid()
    os.chdir("/")
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
