"""S3's requests on all of the server's sockets: who signed them, what their policies allow, and faults."""

from __future__ import annotations

import http
import threading
import time
from collections.abc import Iterable
from typing import Any

from moto.iam.models import iam_backends

from infra.errors import SprError
from infra.local.api.accounts import ACCOUNT
from infra.local.api.interceptors import is_signed_s3
from infra.local.api.s3 import S3Call, S3Error, Storage, error_answer
from infra.local.api.sessions import Sessions
from infra.local.faults import ActiveFaults
from infra.local.policy import Policy, parse_policy
from infra.local.state import StateFolder


class BucketServer:
    """A WSGI application that serves S3 without the lock of :class:`.Application`."""

    def __init__(self, folder: StateFolder, faults: ActiveFaults) -> None:
        self._storage, self._faults = Storage(folder.buckets), faults
        self._credentials = folder.credentials()
        self.sessions = Sessions(self._credentials[1])
        self._lock = threading.Lock()

    def __call__(
        self, environ: dict[str, Any], start_response: Any, region: str | None = None
    ) -> Iterable[bytes]:
        call = S3Call.of(environ)
        try:
            self._admit(environ, call, region)
            status, headers, blocks = self._storage.answer(call)
        except (S3Error, SprError) as error:
            status, headers, blocks = error_answer(error)
        if call.method == "HEAD":
            blocks = ()
        if isinstance(blocks, tuple) and call.method != "HEAD":
            headers = {**headers, "Content-Length": str(sum(map(len, blocks)))}
        headers.setdefault("x-amz-request-id", "LOCAL")
        start_response(f"{status} {http.HTTPStatus(status).phrase}", list(headers.items()))
        return blocks

    def _admit(self, environ: dict[str, Any], call: S3Call, region: str | None) -> None:
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        profile = self.sessions.profile_of(token, time.time())
        if token and not profile:
            raise S3Error(400, "ExpiredToken", "The provided token has expired.")
        keys = self.sessions.keys_of(token) if profile else self._credentials
        is_signed = is_signed_s3(environ, keys)
        # A node's requests only for its own region, as in China and in GovCloud.
        if not is_signed or (region and f"/{region}/s3/" not in environ["HTTP_AUTHORIZATION"]):
            raise S3Error(
                403, "InvalidAccessKeyId", "The request is not signed with known credentials"
            )
        if call.headers.get("x-amz-expected-bucket-owner", ACCOUNT) != ACCOUNT:
            raise S3Error(403, "AccessDenied")
        for request in call.permissions():
            allowed = (
                _role_policy(profile).allows(request) if profile else self._faults.allows(request)
            )
            if not allowed:
                who = f"role of {profile}" if profile else "user"
                text = f"{who} is not authorized to perform: {request.action} on {request.resource}"
                raise S3Error(403, "AccessDenied", text)
        with self._lock:
            error = self._faults.find_error(call.operation)
        if error:
            raise S3Error(error.http_status, error.code, error.message)


def _role_policy(profile: str) -> Policy:
    """Return the statements of a profile's role; a removed one allows nothing."""
    found = iam_backends[ACCOUNT]["aws"].instance_profiles.get(profile)
    texts = [text for role in (found.roles if found else ()) for text in role.policies.values()]
    return Policy([s for text in texts for s in parse_policy(text, profile).statements])
