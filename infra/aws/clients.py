"""boto3 clients, created once per command, and the translation of their errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.parsers import ResponseParserError

from infra.aws.api_time import API_TIME, FIX_CLOCK, why_refused
from infra.aws.caller import Caller
from infra.aws.cloud import (
    CREDENTIALS_HINT,
    Cloud,
    CredentialsError,
    explain_credentials,
    explain_role,
)
from infra.aws.new_resources import NewResources
from infra.aws.outage import OUTAGE, is_about_certificate
from infra.errors import CloudError, DeadlineError, SprError
from infra.wait import Clock, wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_iam import IAMClient
    from types_boto3_pricing import PricingClient
    from types_boto3_s3 import S3Client
    from types_boto3_scheduler import EventBridgeSchedulerClient
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient
    from types_boto3_sts import STSClient


T = TypeVar("T")

# A new resource is visible everywhere within seconds.
_VISIBLE_DEADLINE_S = 30.0
_ATTEMPTS = 12
PRICING_TIMEOUTS: Any = {"connect_timeout": 3.0, "read_timeout": 5.0}
# Those that botocore retries, and answers of others, such as a network login page.
_LOST = (boto.ConnectionError, boto.HTTPClientError, ResponseParserError)
_BUSY = {
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "InternalError",
    "InternalFailure",
    "ServiceUnavailable",
    "Unavailable",
}


class Clients:
    """One client per AWS service, created on first use."""

    def __init__(
        self, session: boto3.session.Session, config: Config, url: str | None, region: str
    ) -> None:
        self._session, self._config, self._url, self._region = session, config, url, region
        self.labels: dict[str, str] = {}
        """The user's tags for new resources."""

    def _client(self, service: Any, config: Config | None = None, region: str | None = None) -> Any:
        client = self._session.client(
            service,
            endpoint_url=self._url,
            config=config or self._config,
            region_name=region or self._region,
        )
        client.meta.events.register("provide-client-params", self._label)
        return client

    def _hasty(
        self, service: Any, attempts: int, region: str | None = None, **timeouts: Any
    ) -> Any:
        """Return a client that gives up after a few attempts."""
        few = Config(retries={"mode": "standard", "total_max_attempts": attempts}, **timeouts)
        return self._client(service, self._config.merge(few), region)

    def _label(self, params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
        """Add the user's tags to those of a new resource, which every creating call has."""
        labels = [{"Key": key, "Value": value} for key, value in self.labels.items()]
        if labels and model.name in _TAGGED and "Tags" in params:
            return {**params, "Tags": [*params["Tags"], *labels]}
        if labels and (specs := params.get("TagSpecifications")):
            named = {tag["Key"] for spec in specs for tag in spec["Tags"]}
            new = [label for label in labels if label["Key"] not in named]
            own = [{**spec, "Tags": [*spec["Tags"], *new]} for spec in specs]
            return {**params, "TagSpecifications": own}
        return params

    @cached_property
    def ec2(self) -> EC2Client:
        return cast("EC2Client", self._client("ec2"))

    @cached_property
    def buyer(self) -> EC2Client:
        """EC2 without the SDK's retries: :mod:`infra.ec2.purchase` decides what to do after a refusal."""
        return cast("EC2Client", self._hasty("ec2", 1))

    @cached_property
    def dry(self) -> EC2Client:
        """EC2 in dry-run mode: every allowed call fails with ``DryRunOperation``."""
        client = self._client("ec2")
        client.meta.events.register(
            "provide-client-params.ec2", lambda params, **_: {**params, "DryRun": True}
        )
        return cast("EC2Client", client)

    @cached_property
    def quotas(self) -> ServiceQuotasClient:
        """Service Quotas, with few attempts: quotas are only informative, and some networks block it."""
        return cast("ServiceQuotasClient", self._hasty("service-quotas", 2, connect_timeout=3))

    @cached_property
    def ssm(self) -> SSMClient:
        return cast("SSMClient", self._client("ssm"))

    @cached_property
    def iam(self) -> IAMClient:
        return cast("IAMClient", self._client("iam"))

    @cached_property
    def s3(self) -> S3Client:
        """The S3 of this cloud, unlike :func:`infra.aws.s3.connect_s3`, which is always AWS's."""
        # On the embedded cloud, no name server knows a bucket's own host name.
        style = Config(s3={"addressing_style": "path" if self._url else "auto"})
        return cast("S3Client", self._client("s3", self._config.merge(style)))

    @cached_property
    def scheduler(self) -> EventBridgeSchedulerClient:
        """EventBridge Scheduler, with few attempts: many users lack permission or network access."""
        return cast("EventBridgeSchedulerClient", self._hasty("scheduler", 8, connect_timeout=3))

    @cached_property
    def organizations(self) -> Any:
        """AWS Organizations, with few attempts: some networks block it."""
        return self._hasty("organizations", 2, connect_timeout=3)

    @cached_property
    def pricing(self) -> PricingClient:
        """The Price List API, with short timeouts: prices are only informative.

        https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
        """
        nearest = {"eu": "eu-central-1", "ap": "ap-south-1"}
        region = nearest.get(str(self._session.region_name)[:2], "us-east-1")
        return cast("PricingClient", self._hasty("pricing", 1, region, **PRICING_TIMEOUTS))

    @cached_property
    def sts(self) -> STSClient:
        return cast("STSClient", self._client("sts"))

    @cached_property
    def caller(self) -> Caller:
        """The owner of these credentials, from one STS call that needs no permission."""
        return Caller.from_aws(self.sts.get_caller_identity())


def connect(cloud: Cloud) -> Clients:
    """Return the clients of a cloud. Sends nothing."""
    session = cloud.session
    if session is None or cloud.credentials:
        key, secret = cloud.credentials or (None, None)
        session = boto3.session.Session(aws_access_key_id=key, aws_secret_access_key=secret)
    config = Config(
        # The only handling of throttling: adaptive back-off with jitter.
        retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS},
        connect_timeout=10,
        read_timeout=70,
        user_agent_extra="spr-cluster",
        # The embedded cloud runs on this machine, so no proxy is involved.
        proxies={} if cloud.endpoint_url else None,
    )
    # All regions share a session, and the ids keep one handler per event in it.
    session.events.register("after-call", API_TIME.learn, unique_id="spr-cluster-time")
    session.events.register("needs-retry", OUTAGE.notice, unique_id="spr-cluster-outage")
    new = NewResources()
    session.events.register("after-call.ec2", new.learn, unique_id="spr-cluster-new")
    session.events.register(
        "needs-retry.ec2", cast("Any", new.pause), unique_id="spr-cluster-pause"
    )
    return Clients(session, config, cloud.endpoint_url, cloud.region)


def has_credentials(cloud: Cloud) -> bool:
    """Return whether this machine has credentials for a cloud, valid or not. Sends nothing."""
    session = cloud.session
    return bool(cloud.credentials or (session and session.get_credentials()))


def when_visible(call: Callable[..., T], **parameters: Any) -> T:
    """Call EC2 about a resource created seconds ago; retry until the resource is visible.

    EC2 is eventually consistent:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/query-api-troubleshooting.html#eventual-consistency
    """
    return retry(lambda: call(**parameters), is_invisible, deadline_s=_VISIBLE_DEADLINE_S)


def retry(
    call: Callable[[], T],
    is_retryable: Callable[[Exception], bool],
    *,
    deadline_s: float,
    clock: Clock | None = None,
) -> T:
    """Repeat a call while its errors are retryable. Raises the last one at the deadline."""
    failures: list[Exception] = []

    def attempt() -> tuple[T] | None:
        try:
            return (call(),)
        except (boto.ClientError, boto.BotoCoreError) as error:
            if not is_retryable(error):
                raise
            failures.append(error)
            return None

    try:
        return wait_until("", attempt, deadline_s=deadline_s, clock=clock, every_s=3)[0]
    except DeadlineError:
        raise failures[-1] from None


def is_invisible(error: Exception) -> bool:
    """Return whether a resource that the call names is missing or not yet visible everywhere."""
    unseen = (".NotFound", ".Unknown", ".Unavailable")
    return isinstance(error, boto.ClientError) and error_code(error).endswith(unseen)


def is_passing(error: Exception) -> bool:
    """Return whether a retry may succeed: AWS is busy or unreachable."""
    if isinstance(error, boto.ClientError):
        code = error_code(error)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        # EC2 also reports a lack of capacity as a server error.
        return code in _BUSY or (status >= 500 and not code.startswith("Insufficient"))
    return isinstance(error, _LOST)


def patient(probe: Callable[[], T | None]) -> Callable[[], T | None]:
    """Wrap a probe so that a broken connection or a busy EC2 means "not yet".

    Otherwise a laptop that changes networks would abort a 40-minute wait.
    """

    def attempt() -> T | None:
        try:
            return probe()
        except (boto.ClientError, boto.BotoCoreError) as error:
            if not is_passing(error):
                raise
            return None

    return attempt


def error_code(error: boto.ClientError) -> str:
    """Return EC2's error code, such as ``InvalidGroup.NotFound``."""
    return str(error.response.get("Error", {}).get("Code", ""))


def unless(codes: set[str], call: Callable[[], T]) -> T | None:
    """Make a call; return ``None`` if it fails with one of these codes."""
    try:
        return call()
    except boto.ClientError as error:
        if error_code(error) not in codes:
            raise
        return None


_OF_SECOND_GUARD = re.compile(r"\w*Schedule\w*|\w*RolePolicy|(Create|Delete|Get)Role")
# Of the other services: calls whose tags are not those of a specification.
_TAGGED = {"CreateRole", "CreateInstanceProfile", "CreateScheduleGroup"}
_BY_ORGANIZATION = re.compile(
    r"(service control|resource control|session) policy|permissions boundary", re.IGNORECASE
)
DENIED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}
_DENIED_ACTION = re.compile(r"not authorized to perform: [\w-]+:(\w+)")
_EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "AuthFailure",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "InvalidSignatureException",
    "RequestTimeTooSkewed",
    "UnrecognizedClientException",
}
# AWS also sends these codes from a region that the account has not enabled:
# https://repost.aws/knowledge-center/iam-validate-access-credentials
_OF_CLOSED_REGION = {"AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"}
_NOT_ENABLED_HINT = (
    "if `aws sts get-caller-identity --region us-east-1` works, your account has not enabled this "
    f"region (in the console: Account, AWS Regions); otherwise: {CREDENTIALS_HINT}"
)
_BUSY_HINT = "EC2 is busy or throttling this account: run the same command again in a few minutes"
_CODES = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html"
_SUPPORT = "only AWS Support can change that: https://console.aws.amazon.com/support"
_HINTS = {
    "OptInRequired": "enable the region in the console (Account, AWS Regions), or complete the "
    "account's registration",
    "Blocked": _SUPPORT,
    "TagPolicyViolation": "a tag policy of your organization forbids this tag: ask an administrator to "
    "allow it or to exempt this account",
    "PendingVerification": f"this takes minutes, at most four hours; after that {_SUPPORT}",
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "spot needs a role that is created once per "
    "account: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com; "
    "`spr-cluster iam-policy` includes the permission",
}


def translate_boto_error(error: BaseException) -> SprError | None:
    """Translate a botocore error for the user; return our own as it is, and ``None`` for others."""
    if isinstance(error, SprError):
        return error
    if isinstance(error, boto.ClientError):
        return _translate_client_error(error)
    if explained := explain_credentials(error):
        return explained
    if isinstance(error, ResponseParserError):
        return CloudError(
            "the response is not from AWS",
            hint="check for a proxy or a network login page between this machine and AWS",
        )
    if isinstance(error, boto.BotoCoreError):
        hint = "check the network and --region"
        if is_about_certificate(error):
            hint = (
                "if this network inspects TLS, set AWS_CA_BUNDLE to the file with its certificates; "
                "otherwise, the connection may be intercepted"
            )
            if "not yet valid" in str(error):
                hint = FIX_CLOCK
        return CloudError(f"cannot reach AWS: {error}", hint=hint)
    return None


@contextmanager
def changing(hint: str) -> Iterator[None]:
    """Translate the errors of calls that change something; add a hint.

    None is a usage error: exit code 2 would say that nothing was changed.
    """
    try:
        yield
    except (boto.ClientError, boto.BotoCoreError, DeadlineError) as error:
        if (known := translate_boto_error(error)) is None:
            raise
        raise SprError(
            known.message, hint="\n  → ".join(filter(None, (known.hint, hint)))
        ) from None


def _translate_client_error(error: boto.ClientError) -> SprError:
    code = error_code(error)
    operation = error.operation_name
    # EC2 appends a thousand encoded characters that only an administrator can decode.
    detail = re.sub(
        r"\s*Encoded authorization failure message:.*",
        "",
        str(error.response.get("Error", {}).get("Message", error)),
        flags=re.DOTALL,
    )
    if code in DENIED and (refused := explain_role(operation, detail)):
        return refused
    if code in DENIED:
        # The denied action can differ from the operation: tagging a new resource needs ec2:CreateTags.
        named = _DENIED_ACTION.search(detail)
        action = named[1] if named else operation
        if by := _BY_ORGANIZATION.search(detail):
            return CloudError(
                f"a {by[0]} forbids {action}: {detail}",
                code=code,
                hint="your own policy can't allow it: ask the administrator of your AWS organization what it "
                "requires, often tags (`up --tag KEY=VALUE`), a region, or certain instance types",
            )
        return CloudError(
            f"no permission for {action}: {detail}",
            code=code,
            hint=f"ask an administrator to allow {action} (`spr-cluster iam-policy"
            f"{' --second-guard' if _OF_SECOND_GUARD.fullmatch(operation) else ''}` prints the full "
            "policy; add --check to see what is missing), or choose another AWS_PROFILE",
        )
    if code in _EXPIRED and (clock := why_refused(error.response)):
        return CredentialsError(clock, hint=FIX_CLOCK)
    if code in _EXPIRED:
        hint = _NOT_ENABLED_HINT if code in _OF_CLOSED_REGION else CREDENTIALS_HINT
        return CredentialsError(f"AWS rejected the credentials: {detail}", hint=hint)
    hint = _BUSY_HINT if is_passing(error) else _HINTS.get(code, f"error codes: {_CODES}")
    return CloudError(f"{operation} failed: {code}: {detail}", code=code, hint=hint)
