"""S3 with the user's permissions and faults."""

from __future__ import annotations

import threading
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID

from infra.local.api.bucket_server import BucketServer, Refusal, S3Call, deny
from infra.local.state import StateFolder
from tests.cloud.faults import ActiveFaults


class FaultyBuckets(BucketServer):
    """S3 that also follows the policy of its user, under the active faults."""

    def __init__(self, folder: StateFolder, faults: ActiveFaults) -> None:
        super().__init__(folder)
        self._faults, self._lock = faults, threading.Lock()

    def refuse(self, environ: dict[str, Any], region: str | None) -> Refusal | None:
        if stranger := super().refuse(environ, region):
            return stranger
        call = S3Call.of(environ)
        if not call.operation:
            return 501, "NotImplemented", "The embedded cloud's S3 does not serve this"
        if (
            environ.get("HTTP_X_AMZ_EXPECTED_BUCKET_OWNER", DEFAULT_ACCOUNT_ID)
            != DEFAULT_ACCOUNT_ID
        ):
            return 403, "AccessDenied", "Another account owns the bucket"
        is_node = "HTTP_X_AMZ_SECURITY_TOKEN" in environ
        if not is_node and (denied := deny(call, "user", self._faults.allows)):
            return denied
        with self._lock:
            error = self._faults.find_error(call.operation)
            is_throttled = self._faults.is_throttled(call.operation, named=True)
        if is_throttled:
            return 503, "SlowDown", "Please reduce your request rate."
        return (error.http_status, error.code, error.message) if error else None
