"""Temporary credentials of the instances' roles. The server's secret signs them, so they need no storage."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import datetime, timezone

from infra.ec2.tags import render_time

LIFETIME_S = 6 * 3600


class Sessions:
    """Issues and checks the credentials of instances."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def keys_of(self, token: str) -> tuple[str, str]:
        """Return the access key and secret that belong to a session token."""
        return f"ASIA{self._sign('key ' + token)[:16].upper()}", self._sign(f"secret {token}")[:40]

    def render(self, profile: str, instance_id: str, now: float) -> str:
        """Return new credentials as the instance metadata shows them."""
        text = f"{profile}~{instance_id}~{int(now + LIFETIME_S)}"
        token = f"{text}~{self._sign(text)}"
        key, secret = self.keys_of(token)

        def at(seconds: float) -> str:
            return render_time(datetime.fromtimestamp(int(seconds), timezone.utc))

        return json.dumps(
            {
                "Code": "Success",
                "LastUpdated": at(now),
                "Type": "AWS-HMAC",
                "AccessKeyId": key,
                "SecretAccessKey": secret,
                "Token": token,
                "Expiration": at(now + LIFETIME_S),
            },
            indent=2,
        )

    def profile_of(self, token: str, now: float) -> str:
        """Return the instance profile of a session; "" for an unknown or expired one."""
        text, _, signature = token.rpartition("~")
        if not text or not hmac.compare_digest(self._sign(text), signature):
            return ""
        profile, _, expires = text.split("~")
        return profile if float(expires) > now else ""
