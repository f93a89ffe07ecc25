"""The one door to a cluster's API, through the official client: every request passes :meth:`_open`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError, ReadTimeoutError

from infra.wait import Clock, SystemClock
from jobs.launchers.kubernetes.errors import (
    BY_STATUS,
    ForbiddenError,
    KubernetesError,
    NotFoundError,
)
from jobs.launchers.kubernetes.exec_stream import run_in_pod
from jobs.launchers.kubernetes.manifests import Manifest
from jobs.launchers.kubernetes.resources import dig_list

_TIMEOUT_S = (10.0, 60.0)
# Reading or deleting again does no harm; anything else is sent once.
_PAUSES_S = (0.5, 2.0)
_BUSY = {429, 500, 502, 503, 504}
Query = Mapping[str, str]


@dataclass(frozen=True)
class KubernetesApi:
    """A cluster, as a context of a kubeconfig describes it."""

    client: ApiClient
    context: str
    namespace: str
    clock: Clock = field(default_factory=SystemClock)

    def get(self, path: str, query: Query | None = None) -> Manifest:
        """Return an object or list. Raises :class:`KubernetesError`, as all of these do."""
        return self._repeat("GET", path, query)

    def find(self, path: str) -> Manifest | None:
        """Return an object; ``None`` if there is none, or no such type of object."""
        with suppress(NotFoundError):
            return self.get(path)
        return None

    def peek(self, path: str) -> Manifest | None:
        """Return an object; {} if there is none, ``None`` if it may not be read."""
        with suppress(ForbiddenError):
            return self.find(path) or {}
        return None

    def items(self, path: str, selector: str = "") -> list[Manifest]:
        """Return the objects of a list, by a label selector."""
        return dig_list(self.get(path, {"labelSelector": selector} if selector else None), "items")

    def create(self, path: str, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; with ``dry_run`` the cluster only checks it."""
        # Otherwise a field that the cluster's version does not know is silently dropped.
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
        # urllib3 puts the object's address before the reason, the client its type.
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
            hint = "ask the cluster's administrator for a role that allows it"
            if "exceeded quota" in message:
                hint = "ask for less, delete what is not needed, or have the quota raised"
        error = BY_STATUS.get(status, KubernetesError)
        return error(f"context {self.context}: {message}", status=status, hint=hint)


def _message(body: bytes) -> str:
    """Return the message of a ``Status`` object, in one line."""
    try:
        return " ".join(str(json.loads(body)["message"]).split())
    except (ValueError, KeyError, TypeError):
        return ""
