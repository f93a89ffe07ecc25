"""S3 on all of the server's sockets, by moto: who signed a request, and the buckets between two servers."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3.models import s3_backends
from werkzeug.wrappers import Response

from infra.files import write_private
from infra.local.api.interceptors import is_signed_s3
from infra.local.api.sessions import Sessions
from infra.local.state import StateFolder

# S3's default, which moto lacks: https://docs.aws.amazon.com/AmazonS3/latest/userguide/default-encryption-faq.html
_ENCRYPTION = {"Rule": {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}}
Refusal = tuple[int, str, str]
"""HTTP status, code, and message."""


class BucketServer:
    """A WSGI application that serves S3 without the lock of :class:`.Application`."""

    def __init__(self, folder: StateFolder) -> None:
        self._file, self._moto = folder.buckets, create_backend_app("s3")
        self._credentials = folder.credentials()
        self.sessions = Sessions(self._credentials[1])

    def load(self) -> None:
        """Continue with the buckets that the last server saved."""
        try:
            buckets = pickle.loads(self._file.read_bytes())
        except FileNotFoundError:
            return
        except Exception:
            logging.exception("the saved buckets")
            return
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.update(buckets)
        # moto's index of all accounts' buckets.
        s3_backends.bucket_accounts.update(dict.fromkeys(buckets, ("aws", DEFAULT_ACCOUNT_ID)))

    def save(self) -> None:
        """Save all buckets, with their objects."""
        if buckets := s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets:
            write_private(self._file, pickle.dumps(buckets))

    def __call__(
        self, environ: dict[str, Any], start_response: Any, region: str | None = None
    ) -> Iterable[bytes]:
        if refusal := self.refuse(environ, region):
            status, code, text = refusal
            body = f"<Error><Code>{code}</Code><Message>{escape(text)}</Message></Error>"
            response = Response(body, status, content_type="application/xml")
            return response(environ, start_response)
        for bucket in list(s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.values()):
            bucket.encryption = bucket.encryption or _ENCRYPTION
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer

    def refuse(self, environ: dict[str, Any], region: str | None) -> Refusal | None:
        """Return an error for a request that the tool or a node's role did not sign."""
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        profile = self.sessions.profile_of(token, time.time())
        if token and not profile:
            return 400, "ExpiredToken", "The provided token has expired."
        keys = self.sessions.keys_of(token) if profile else self._credentials
        is_signed = is_signed_s3(environ, keys)
        # A node's requests only for its own region, as in China and in GovCloud.
        if not is_signed or (region and f"/{region}/s3/" not in environ["HTTP_AUTHORIZATION"]):
            return 403, "InvalidAccessKeyId", "The request is not signed with known credentials"
        return None
