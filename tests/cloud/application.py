"""The embedded cloud as strict and unreliable as AWS: policies, accounts, schedules, and faults."""

from __future__ import annotations

import base64
import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from moto.core import DEFAULT_ACCOUNT_ID
from moto.scheduler.models import scheduler_backends
from moto.servicequotas.models import servicequotas_backends

from infra.local.api.application import Application, answer_service_setting
from infra.local.api.bucket_server import BucketServer
from infra.local.api.policy import Request
from infra.local.api.requests import ApiCall, Reply, error_reply
from infra.local.api.runtime import replace_backends
from infra.local.machines.containers import NodeContainers
from infra.local.state import StateFolder
from tests.cloud.accounts import Accounts, account_of
from tests.cloud.authorization import requests_of
from tests.cloud.buckets import FaultyBuckets
from tests.cloud.capacity import FaultyQuotas
from tests.cloud.ec2 import FaultyEC2Backend
from tests.cloud.faults import ActiveFaults
from tests.cloud.prices import answer_get_products
from tests.cloud.schedules import FaultyScheduler

_USER = "spr-cluster"
# EC2's codes differ from those of all other services:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#CommonErrors
_DENIED = {"ec2": "UnauthorizedOperation", "sts": "AccessDenied", "iam": "AccessDenied"}
_THROTTLED = {"ec2": ("RequestLimitExceeded", 503)}


def faults_file(folder: StateFolder) -> Path:
    return folder.root / "faults.toml"


class FaultyApplication(Application):
    """The embedded cloud's application, under the faults in :func:`faults_file`.

    Without ``saving``, the state stays in memory. ``on_call`` receives each EC2 action twice, with "before"
    and "after"; by "after", it has been saved but not answered. ``calls`` counts EC2 calls by action,
    including rejected ones.
    """

    backend_type = FaultyEC2Backend

    def __init__(
        self,
        containers: NodeContainers,
        folder: StateFolder,
        *,
        saving: bool = True,
        **options: Any,
    ) -> None:
        self.faults = ActiveFaults(faults_file(folder))
        super().__init__(containers, folder, conditions=self.faults, **options)
        self._accounts = Accounts(self.faults, folder.credentials())
        self.calls: Counter[str] = Counter()
        self.on_call: Callable[[str, str], None] | None = None
        self._saving = saving
        if not saving:
            self._nodes: Any = Mock()

    def save(self) -> None:
        if self._saving:
            super().save()

    def _refuse(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        if call.service == "ec2":
            self.calls[call.action] += 1
        return super()._refuse(environ, call)

    def _notify(self, call: ApiCall, moment: str) -> None:
        if self.on_call and call.service == "ec2":
            self.on_call(call.action, moment)

    def _make_buckets(self, folder: StateFolder) -> BucketServer:
        return FaultyBuckets(folder, self.faults)

    def _regions_of(self, account: str) -> Any:
        is_new = account not in self._known_accounts
        regions = super()._regions_of(account)
        if is_new:
            quotas = functools.partial(FaultyQuotas, faults=self.faults)
            replace_backends(servicequotas_backends, account, quotas)
            scheduler = functools.partial(FaultyScheduler, runtime=self.runtime)
            replace_backends(scheduler_backends, account, scheduler)
        return regions

    def _act(self, environ: dict[str, Any], call: ApiCall) -> Reply:
        if self.faults.is_throttled(call.action):
            code, status = _THROTTLED.get(call.service, ("ThrottlingException", 400))
            return error_reply(call, status, code, "Request limit exceeded.")
        error = self.faults.find_error(call.action)
        if error is None:
            return self._act_for_caller(environ, call)
        if error.effect:
            self._act_for_caller(environ, call)
        return error_reply(call, error.http_status, error.code, error.message)

    def _act_for_caller(self, environ: dict[str, Any], call: ApiCall) -> Reply:
        if call.action == "GetServiceSetting":
            return answer_service_setting(call, is_set=self.faults.now.network.host_management)
        caller = self._accounts.caller_of(environ)
        if (account := account_of(caller)) != DEFAULT_ACCOUNT_ID and call.region in self._regions:
            self.open_region(call.region, account)
        if call.action == "GetProducts":
            return answer_get_products(call, self.faults)
        self._notify(call, "before")
        reply = self._accounts.answer(call, caller) or super()._act(environ, call)
        self._notify(call, "after")
        return reply

    def _deny(self, call: ApiCall) -> Reply | None:
        """Return an error unless the policy allows all requests of a call."""
        if self.faults.policy is None:
            return None
        # AWS allows this call to every caller, regardless of policies.
        if call.action == "GetCallerIdentity":
            return None
        ec2 = self._regions[call.region]
        for request in requests_of(call, ec2, self.faults.tag_delay_s):
            if not self.faults.allows(request):
                code = _DENIED.get(call.service, "AccessDeniedException")
                return error_reply(call, 403, code, self._explain(call, request))
        return None

    def _explain(self, call: ApiCall, request: Request) -> str:
        """Explain a denial as AWS does.

        https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_access-denied.html
        """
        user = f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:user/{_USER}"
        why = (
            f"User: {user} is not authorized to perform: {request.action} on resource: "
            f"{request.resource} because no identity-based policy allows the {request.action} action"
        )
        if call.service != "ec2":
            return why
        encoded = base64.b64encode(json.dumps(asdict(request)).encode()).decode()
        return (
            f"You are not authorized to perform this operation. {why}. "
            f"Encoded authorization failure message: {encoded}"
        )
