"""EC2 as strict and unreliable as AWS: with eventual consistency, limited capacity, and fates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.ec2.models.instances import Instance
from moto.iam.models import iam_backends

from infra.local.api import refusals
from infra.local.api.ec2 import LocalEC2Backend
from tests.cloud import responses
from tests.cloud.faults import faults_of
from tests.cloud.launches import LimitedInstances, LimitedLaunches
from tests.cloud.lifecycle import FatefulLifecycle
from tests.cloud.visibility import Visibility


class FaultyEC2Backend(LocalEC2Backend):
    """One region's EC2, under the active faults."""

    lifecycle_type = FatefulLifecycle
    instances_type = LimitedInstances
    launches_type = LimitedLaunches
    _url_module = responses

    def __init__(self, region_name: str, account_id: str, *, runtime: Any) -> None:
        self.runtime = runtime
        self.visibility = Visibility(self)
        super().__init__(region_name, account_id, runtime=runtime)

    def live_instances(self) -> list[Instance]:
        return self.visibility.live_instances()

    def resources(self) -> dict[str, Any]:
        return self.visibility.resources()

    @contextmanager
    def observe(self, action: str) -> Iterator[None]:
        with self.visibility.observe(action):
            yield

    def forget_instance(self, instance_id: str) -> None:
        super().forget_instance(instance_id)
        self.visibility.created_at.pop(instance_id, None)

    def require_profile(self, name: str) -> None:
        super().require_profile(name)
        profile, now = (
            iam_backends[self.account_id]["aws"].instance_profiles[name],
            self.runtime.now(),
        )
        # moto's creation time comes from this machine's clock, which tests replace.
        since = vars(profile).setdefault("spr_first_used", now)
        if now < since + faults_of(self.runtime).now.role_visibility_s:
            raise refusals.invalid_profile(name)
