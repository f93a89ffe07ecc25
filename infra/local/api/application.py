"""The WSGI application of the embedded cloud, which wraps each of moto's API calls."""

from __future__ import annotations

import functools
import hmac
import json
import logging
import threading
import time
from collections.abc import Collection, Iterable
from typing import Any, ClassVar
from urllib.parse import parse_qs

from moto.backends import list_of_moto_modules
from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.scheduler.models import scheduler_backends
from moto.servicequotas.models import servicequotas_backends
from moto.ssm.models import Parameter, ssm_backends
from werkzeug.test import run_wsgi_app

from infra.ec2.images import RELEASES, ubuntu_parameter
from infra.errors import SprError
from infra.local.api.bucket_server import BucketServer
from infra.local.api.ec2 import LocalEC2Backend, hide_invented_addresses, place_of
from infra.local.api.interceptors import answer_dry_run, refuse_stranger
from infra.local.api.node_services import NodeServices
from infra.local.api.quotas import LocalQuotas
from infra.local.api.requests import (
    READS,
    ApiCall,
    Reply,
    error_reply,
    json_reply,
    read_call,
    reason_of,
)
from infra.local.api.runtime import Conditions, Runtime, ServerClock, replace_backends
from infra.local.api.schedules import LocalScheduler
from infra.local.machines.containers import NodeContainers
from infra.local.machines.host import gateway_of
from infra.local.state import (
    STATUS_PATH,
    StateFolder,
    load_snapshot,
    release_of,
    save_snapshot,
    snapshot_release,
)

# A key in the snapshot, next to the regions.
_ACCOUNTS = "accounts"
# The start of the names of calls that remove something; repeating one is harmless.
_FREEING = (
    *("Terminate", "Delete", "Deregister", "Detach", "Disassociate"),
    *("Cancel", "Release", "Remove", "Revoke"),
)


class Application:
    """Handles one request at a time, and saves the state before responding.

    Accounts share nothing; only tests have several.
    """

    backend_type: ClassVar[type[LocalEC2Backend]] = LocalEC2Backend

    def __init__(
        self,
        containers: NodeContainers,
        folder: StateFolder,
        *,
        clock: ServerClock | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        hide_invented_addresses()
        self.runtime = Runtime(containers, clock or time, conditions or Conditions())
        self.lock = threading.RLock()
        self._open: set[tuple[str, str]] = set()
        self._known_accounts: list[str] = []
        self._regions = self._regions_of(DEFAULT_ACCOUNT_ID)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._services: dict[str, Any] = {}
        self._credentials = folder.credentials()
        self.buckets = self._make_buckets(folder)
        self._nodes = NodeServices(self.buckets)
        self._folder = folder
        self._is_saved = True

    def _make_buckets(self, folder: StateFolder) -> BucketServer:
        return BucketServer(folder)

    def _regions_of(self, account: str) -> Any:
        """Return an account's EC2 backends by region."""
        regions = ec2_backends[account]
        if account not in self._known_accounts:
            self._known_accounts.append(account)
            regions.backend = functools.partial(self.backend_type, runtime=self.runtime)
            replace_backends(servicequotas_backends, account, LocalQuotas)
            replace_backends(scheduler_backends, account, LocalScheduler)
        return regions

    def _backends(self) -> dict[str, Any]:
        """Return the EC2 backends in use, of all accounts and regions."""
        return {
            place_of(account, region): backend
            for account in self._known_accounts
            for region, backend in list(ec2_backends[account].items())
        }

    def load(self, *, suspended: Collection[str]) -> None:
        """Continue from the saved state. ``local stop`` has stopped the ``suspended`` containers.

        Raises :class:`CloudError` if the state is unusable.
        """
        self.runtime.conditions.refresh()
        self.buckets.load()
        saved = load_snapshot(self._folder.snapshot)
        for account, state in saved.pop(_ACCOUNTS, {}).items():
            self._restore(account, *state)
        for backend in saved.values():
            self._regions_of(backend.account_id)[backend.region_name] = backend
            backend.resume(self.runtime, suspended=suspended)
        self.save()

    def _restore(self, account: str, schedulers: Any, roles: Any, profiles: Any) -> None:
        """Restore what an account has besides EC2."""
        self._regions_of(account)
        for region, saved in schedulers.items():
            scheduler = scheduler_backends[account][region]
            scheduler.schedule_groups, scheduler.tagger = saved.schedule_groups, saved.tagger
        iam = iam_backends[account]["aws"]
        iam.roles.update(roles)
        iam.instance_profiles.update(profiles)

    def open_region(self, region: str, account: str = DEFAULT_ACCOUNT_ID) -> None:
        """Set up a region's EC2: its network, and Ubuntu's image in its parameter store."""
        if (account, region) not in self._open:
            # The first access makes moto create the backend, which creates the network.
            self._regions_of(account)[region]
            publish_image_parameters(account, region, self.runtime.containers.base.ami_id)
            self.save()
            self._open.add((account, region))

    def save(self) -> None:
        self._is_saved = False
        iam = {account: iam_backends[account]["aws"] for account in self._known_accounts}
        more = {
            account: (dict(scheduler_backends[account]), each.roles, each.instance_profiles)
            for account, each in iam.items()
        }
        save_snapshot(self._folder.snapshot, {**self._backends(), _ACCOUNTS: more})
        self._is_saved = True

    def reconcile(self) -> None:
        """Apply changes that nodes made themselves; a failure must not block the request."""
        self.runtime.conditions.refresh()
        try:
            changed = [self._run_schedules()]
            changed += [backend.reconcile() for backend in self._backends().values()]
            self._nodes.follow(list(self._backends().values()))
            if any(changed) or not self._is_saved:
                self.save()
        except Exception:
            logging.exception("reconciling with the nodes")

    def _run_schedules(self) -> bool:
        """Execute due schedules; return whether there were any."""
        invoked = [
            scheduler.pass_time(ec2_backends[account][region])
            for account in self._known_accounts
            for region, scheduler in dict(scheduler_backends[account]).items()
            if region in ec2_backends[account].keys()  # noqa: SIM118 - a lookup would create it
        ]
        return any(invoked)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if "/s3/aws4_request" in environ.get("HTTP_AUTHORIZATION", ""):
            return self.buckets(environ, start_response)
        with self.lock:
            if path == STATUS_PATH:
                answer = self._answer_tool(environ)
            elif path.startswith("/moto-api"):
                # moto's own API could erase the state without removing the containers.
                answer = _NOT_FOUND
            else:
                answer = self._answer_call(environ)
        start_response(answer.status, list(answer.headers))
        return [answer.body]

    def _answer_call(self, environ: dict[str, Any]) -> Reply:
        call = read_call(environ)
        self.reconcile()
        try:
            if refusal := self._refuse(environ, call):
                return refusal
            if call.service not in _SERVICES:
                # moto would fail without a proper error response.
                text = f"The embedded cloud does not serve {call.service}"
                return error_reply(call, 400, "UnknownOperationException", text)
            if not self._is_saved and not call.action.startswith((*READS, *_FREEING)):
                # While the disk is full, a retry would find the effects of a call that failed.
                self.save()
            return self._act(environ, call)
        except (OSError, SprError) as error:
            return error_reply(call, 500, "InternalError", self._explain_failure(error))

    def _explain_failure(self, error: OSError | SprError) -> str:
        logging.error("%s", error)
        return f"the embedded cloud in {self._folder.root}: {reason_of(error)}"

    def _refuse(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        """Return the response to a call that is unsigned, denied, or a dry run."""
        if stranger := refuse_stranger(environ, call, self._credentials):
            return stranger
        if call.action == "SimulatePrincipalPolicy":
            return error_reply(call, 403, "AccessDenied", "The embedded cloud has no simulator.")
        return self._deny(call) or answer_dry_run(call, self._regions[call.region])

    def _deny(self, _: ApiCall) -> Reply | None:
        """Return an error for a call that the caller's policy does not allow; here, all are allowed."""
        return None

    def _act(self, environ: dict[str, Any], call: ApiCall) -> Reply:
        if call.service == "organizations":
            text = "Your account is not a member of an organization."
            return error_reply(call, 400, "AWSOrganizationsNotInUseException", text)
        if call.action == "GetServiceSetting":
            return answer_service_setting(call)
        if call.action == "GetProducts":
            # Containers cost nothing.
            return json_reply({"FormatVersion": "aws_v1", "PriceList": []})
        try:
            answer = _call_wsgi(self._service(environ, call), environ)
        except NotImplementedError as error:
            return error_reply(call, 400, "UnsupportedOperation", str(error))
        except ValueError as error:  # moto does not find an element of a list
            return error_reply(call, 404, "NoSuchEntity", str(error))
        if not call.action.startswith(READS):
            for backend in self._backends().values():
                # Events without a delay happen before the response.
                backend.lifecycle.pass_time()
            self.save()
        return answer

    def _service(self, environ: dict[str, Any], call: ApiCall) -> Any:
        """Return moto's application for a service. The cache saves moto a slow search for every call."""
        if call.service not in self._services:
            self._services[call.service] = self._moto.get_application(environ)
        return self._services[call.service]

    def _answer_tool(self, environ: dict[str, Any]) -> Reply:
        """Open a region for this tool's commands, and describe it and the server."""
        given, wanted = environ.get("HTTP_AUTHORIZATION", ""), f"Bearer {self._credentials[1]}"
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            return _FORBIDDEN
        region = parse_qs(environ.get("QUERY_STRING", "")).get("region", [""])[0]
        try:
            self.open_region(region)
        except KeyError:
            return _NOT_FOUND
        except (OSError, SprError) as error:
            answer = {"message": self._explain_failure(error)}
            return json_reply(answer, "500 Internal Server Error")
        base = self.runtime.containers.base.reference.rpartition(":")[2]
        answer = {"gateway": gateway_of(self._regions[region].vpc_range)}
        return json_reply({**answer, "release": release_of(base), "snapshots": snapshot_release()})


def answer_service_setting(call: ApiCall, *, is_set: bool = True) -> Reply:
    """Answer Systems Manager's GetServiceSetting for host management, which moto lacks."""
    setting = json.loads(call.body)["SettingId"]
    role = "service-role/AWSSystemsManagerDefaultEC2InstanceManagementRole"
    value = role if is_set else "$None"
    return json_reply({"ServiceSetting": {"SettingId": setting, "SettingValue": value}})


_SERVICES = frozenset({*list_of_moto_modules(), "pricing"})
_FORBIDDEN = Reply("403 Forbidden", (("Content-Length", "0"),), b"")
_NOT_FOUND = Reply("404 Not Found", (("Content-Length", "0"),), b"")


def _call_wsgi(application: Any, environ: dict[str, Any]) -> Reply:
    """Return the complete response of another WSGI application."""
    body, status, headers = run_wsgi_app(application, environ, buffered=True)
    return Reply(status, tuple(headers.items()), b"".join(body))


def publish_image_parameters(account: str, region: str, ami_id: str) -> None:
    """Publish the base image in Canonical's parameters; moto's API rejects writes below `/aws`."""
    parameters = ssm_backends[account][region]._parameters
    for name in map(ubuntu_parameter, RELEASES):
        unset = (None, None, None)  # description, allowed pattern, and encryption key
        found = Parameter(account, name, ami_id, "String", *unset, utcnow(), 1, "aws:ec2:image")
        parameters[name] = [found]
