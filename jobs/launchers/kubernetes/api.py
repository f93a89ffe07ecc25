"""A Kubernetes cluster's API through the official client; every request passes through :meth:`_open`.

The only module that needs the extra `[k8s]`: ``chosen_job.open_api`` imports it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
from kubernetes.stream.ws_client import (
    ERROR_CHANNEL,
    STDERR_CHANNEL,
    STDOUT_CHANNEL,
    V4_CHANNEL_PROTOCOL,
    create_websocket,
    get_websocket_url,
)
from urllib3.exceptions import HTTPError, ReadTimeoutError
from websocket import ABNF, WebSocket, WebSocketException

from infra.errors import UsageError
from infra.wait import Clock, SystemClock
from jobs.launchers.kubernetes.errors import (
    BY_STATUS,
    ForbiddenError,
    KubernetesError,
    NotFoundError,
)
from jobs.launchers.kubernetes.manifests import Manifest
from jobs.launchers.kubernetes.resources import dig_list

_SILENCE_S = 60.0


def run_in_pod(client: ApiClient, path: str, query: list[tuple[str, str]]) -> Iterator[bytes]:
    """Run a command and yield its output. Raises :class:`KubernetesError` if it fails."""
    headers: dict[str, str] = {}
    client.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
    headers["sec-websocket-protocol"] = V4_CHANNEL_PROTOCOL
    url = get_websocket_url(client.configuration.host + path, query)
    try:
        socket = create_websocket(client.configuration, url, headers)
    except (WebSocketException, OSError) as error:
        raise KubernetesError(f"no command can be run in the pod: {error}") from error
    socket.settimeout(_SILENCE_S)
    try:
        yield from _read_stdout(socket)
    except (WebSocketException, OSError, ValueError) as error:
        raise KubernetesError(f"the connection to the pod broke off: {error}") from error
    finally:
        socket.close()


def _read_stdout(socket: WebSocket) -> Iterator[bytes]:
    errors = b""
    while True:
        code, frame = socket.recv_data_frame(True)
        if code == ABNF.OPCODE_CLOSE:
            raise KubernetesError("the connection to the pod broke off")
        channel, data = frame.data[0:1], frame.data[1:]
        if channel == bytes([STDOUT_CHANNEL]) and data:
            yield data
        elif channel == bytes([STDERR_CHANNEL]):
            errors += data
        elif channel == bytes([ERROR_CHANNEL]):
            # It comes last, so all output has arrived.
            _require_success(json.loads(data), errors)
            return


def _require_success(status: dict[str, Any], errors: bytes) -> None:
    if status.get("status") != "Success":
        text = " ".join(errors.decode(errors="replace").split()) or str(status.get("message"))
        # With a status, the command did run and would fail again.
        raise KubernetesError(f"in the pod: {text}", status=int(status.get("code") or 500))


_TIMEOUT_S = (10.0, 60.0)
# Only reads and deletes are safe to repeat.
_PAUSES_S = (0.5, 2.0)
_BUSY = {429, 500, 502, 503, 504}
Query = Mapping[str, str]


@dataclass(frozen=True)
class KubernetesApi:
    """A cluster, from a context of a kubeconfig."""

    client: ApiClient
    context: str
    namespace: str
    clock: Clock = field(default_factory=SystemClock)

    def get(self, path: str, query: Query | None = None) -> Manifest:
        """Return an object or list. Like all of these methods, raises :class:`KubernetesError`."""
        return self._repeat("GET", path, query)

    def find(self, path: str) -> Manifest | None:
        """Return an object; ``None`` if neither it nor its type exists."""
        with suppress(NotFoundError):
            return self.get(path)
        return None

    def peek(self, path: str) -> Manifest | None:
        """Return an object; {} if there is none, ``None`` without permission to read it."""
        with suppress(ForbiddenError):
            return self.find(path) or {}
        return None

    def items(self, path: str, selector: str = "") -> list[Manifest]:
        """Return the objects that match a label selector."""
        return dig_list(self.get(path, {"labelSelector": selector} if selector else None), "items")

    def create(self, path: str, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; with ``dry_run``, the cluster only validates it."""
        # Otherwise the cluster silently drops fields that its version does not know.
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._send("POST", path, query, manifest)

    def delete(self, path: str, query: Query | None = None) -> None:
        """Delete an object, if there is one."""
        with suppress(NotFoundError):
            self._repeat("DELETE", path, query)

    def lines(self, path: str, query: Query, *, keep_rest: bool) -> Iterator[bytes]:
        """Yield a stream's lines until it ends or is silent for a minute.

        ``keep_rest`` also yields what follows the last newline. Raises :class:`KubernetesError` if it
        breaks off.
        """
        response = self._open("GET", path, query, accept="text/plain, */*").response
        try:
            for line in response:
                if keep_rest or line.endswith(b"\n"):
                    yield line.removesuffix(b"\n")
        except ReadTimeoutError:
            return
        except (HTTPError, OSError) as error:
            raise KubernetesError(f"the stream broke off: {error}") from error
        finally:
            response.close()

    def run(self, path: str, container: str, command: list[str]) -> Iterator[bytes]:
        """Run a command in a pod, and yield its output. Raises :class:`KubernetesError` if it fails."""
        query = [("command", word) for word in command]
        query += [("container", container), ("stdout", "true"), ("stderr", "true")]
        return run_in_pod(self.client, f"{path}/exec", query)

    def _repeat(self, method: str, path: str, query: Query | None) -> Manifest:
        for pause in _PAUSES_S:
            try:
                return self._send(method, path, query)
            except KubernetesError as error:
                if error.status and error.status not in _BUSY:
                    raise
            self.clock.sleep(pause)
        return self._send(method, path, query)

    def _send(
        self, method: str, path: str, query: Query | None, body: Manifest | None = None
    ) -> Manifest:
        response = self._open(method, path, query or {}, body)
        try:
            found = json.loads(response.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KubernetesError("the server's answer is not JSON: is it a Kubernetes API?")
        return found

    def _open(
        self,
        method: str,
        path: str,
        query: Query,
        body: Manifest | None = None,
        accept: str = "application/json",
    ) -> Any:
        """Return the client's response; only that of JSON is read."""
        request = self.client.param_serialize(
            method,
            path,
            query_params=[*query.items()],
            header_params={"Accept": accept, "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self.client.call_api(*request, _request_timeout=_TIMEOUT_S)
            if accept == "application/json" or response.status >= HTTPStatus.BAD_REQUEST:
                response.read()
        except (HTTPError, OSError, ApiException) as error:
            raise self._silent(error) from error
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._refused(response.status, response.data)
        return response

    def _silent(self, error: Exception) -> KubernetesError:
        # urllib3 prefixes the reason with an object's address, the client with its type.
        reason = str(getattr(error, "reason", None) or error).split(": ", 1)[-1]
        return KubernetesError(
            f"context {self.context}: {self.client.configuration.host} doesn't answer: {reason}",
            hint="is the cluster running, and is its network (VPN) reachable? --context chooses another",
        )

    def _refused(self, status: int, body: bytes) -> KubernetesError:
        if status == HTTPStatus.UNAUTHORIZED:
            return KubernetesError(
                f"the cluster refuses the credentials of context {self.context}: invalid or expired",
                status=status,
                hint=f"log in to it again; `kubectl --context {self.context} auth whoami` tries them",
            )
        hint = None
        message = _message(body) or f"HTTP status {status}"
        if status == HTTPStatus.FORBIDDEN:
            hint = "request a role that allows it from the cluster's administrator"
            if "exceeded quota" in message:
                hint = "request less, delete what is not needed, or have the quota raised"
        error = BY_STATUS.get(status, KubernetesError)
        return error(f"context {self.context}: {message}", status=status, hint=hint)


def _message(body: bytes) -> str:
    """Return the message of a ``Status`` object, in one line."""
    try:
        return " ".join(str(json.loads(body)["message"]).split())
    except (ValueError, KeyError, TypeError):
        return ""


_DEFAULT = "~/.kube/config"
# What the client raises for a file that is no kubeconfig.
_DAMAGE = (ConfigException, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError)


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> KubernetesApi:
    """Return the API of a context, by default the current one, without sending a request.

    Raises :class:`UsageError` for a kubeconfig that is missing or damaged, and for a credentials plugin
    that fails.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG") or _DEFAULT
    files = [Path(each).expanduser() for each in path.split(os.pathsep) if each]
    if not any(file.is_file() for file in files):
        raise UsageError(
            f"no kubeconfig: {path} doesn't exist",
            hint="your cluster's provider makes one; name it with --kubeconfig or KUBECONFIG",
        )
    configuration = Configuration()
    # urllib3 would also repeat requests that are unsafe to repeat.
    configuration.retries = False
    with _errors_of_plugins() as errors:
        found = _load(path, context, configuration)
    if errors:
        reason = " ".join(errors[0].getMessage().split())
        raise UsageError(
            f"context {found['name']}: its credentials plugin failed: {reason}",
            hint="log in to the cluster again",
        )
    chosen = namespace or (found.get("context") or {}).get("namespace") or "default"
    return KubernetesApi(ApiClient(configuration), str(found["name"]), str(chosen))


def _load(path: str, context: str | None, configuration: Configuration) -> Any:
    """Fill the client's configuration; return the context."""
    try:
        merged = KubeConfigMerger(path)
        known = [each["name"] for each in merged.config.value["contexts"]]
        if context and context not in known:
            hint = f"it has {', '.join(map(str, known)) or 'none'}"
            raise UsageError(f"--context {context}: {path} has no such context", hint=hint)
        loader = KubeConfigLoader(
            merged.config, context, config_base_path=None, config_persister=merged.save_changes
        )
        loader.load_and_set(configuration)
        if not loader.current_context["context"].get("cluster"):
            raise ConfigException("the context names no cluster")
        return loader.current_context
    except _DAMAGE as error:
        raise UsageError(
            f"{path}: {' '.join(str(error).split()) or type(error).__name__}",
            hint="`kubectl config get-contexts` lists the contexts, --context chooses one",
        ) from error


@contextmanager
def _errors_of_plugins() -> Iterator[list[logging.LogRecord]]:
    """Collect what the client logs about a failing plugin, for which it raises nothing."""
    collector, root = BufferingHandler(capacity=1000), logging.getLogger()
    collector.setLevel(logging.ERROR)
    root.addHandler(collector)
    try:
        yield collector.buffer
    finally:
        root.removeHandler(collector)
