"""Locations in S3, as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.errors import UsageError

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_EXPECTED = "expected s3://BUCKET or s3://BUCKET/PREFIX"


@dataclass(frozen=True)
class S3Location:
    """A bucket and a key prefix without leading or trailing ``/``."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def below(self, name: str) -> S3Location:
        """Return a location inside this one."""
        return S3Location(self.bucket, f"{self.prefix}/{name}".strip("/"))


def parse_s3_url(url: str, flag: str = "--push-to") -> S3Location:
    """Parse ``s3://bucket/prefix``. Raises :class:`UsageError` for anything else."""
    scheme, found, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not found or not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{flag} {url}: {_EXPECTED}")
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise UsageError(f"{flag} {url}: {_EXPECTED}, without empty parts, `.`, or `..`")
    return S3Location(bucket, "/".join(parts))


def check_bucket_name(name: str, flag: str) -> str:
    """Return a bucket's name. Raises :class:`UsageError` for anything else."""
    if not _BUCKET.fullmatch(name):
        raise UsageError(
            f"{flag} {name}: expected 3 to 63 lowercase letters, digits, hyphens, and dots, "
            "with a letter or digit at both ends"
        )
    return name


# What tags may hold; and a wildcard or variable in a policy would allow more than this prefix.
_PLAIN = re.compile(r"[A-Za-z0-9_.:/=+@-]*")
_LONGEST_TAG = 256


def check_prefixes(urls: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """Return the locations that nodes may use, normalized. Raises :class:`UsageError`."""
    places = tuple(dict.fromkeys(str(parse_s3_url(url, flag)) for url in urls))
    for place in places:
        if not _PLAIN.fullmatch(place.removeprefix("s3://")):
            raise UsageError(f"{flag} {place}: use only letters, digits, and _ . : / = + @ -")
    if len(" ".join(places)) > _LONGEST_TAG:
        raise UsageError(f"{flag}: longer than {_LONGEST_TAG} characters, which a tag can't hold")
    return places
