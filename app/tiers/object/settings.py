"""Settings of a tier of type `object`."""

from __future__ import annotations

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvferry.app.settings.tiers import ServerSettings
from kvferry.app.settings.types import WHOLE, FilePath, Word, split_url

SCHEMES = ("s3", "gs", "az")
DEFAULT_PREFIX = "kvferry"
"""Where objects are put in a bucket if the URL has no path."""
_PATH = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/|\Z))*", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_NO_CREDENTIALS = (
    "must not contain credentials, since URLs end up in logs: put them into a file that credentials_file names"
)


def _url(value: object) -> SecretStr:
    """Parse the URL of a bucket. The value is masked in errors, since it may contain credentials."""
    rule = "must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    parts = split_url(value, rule, _NO_CREDENTIALS)
    is_bucket = parts.scheme in SCHEMES and _BUCKET.fullmatch(parts.netloc)
    if not is_bucket or not _PATH.fullmatch(parts.path.removeprefix("/")):
        raise ValueError(f"{rule}, with letters, digits, and . _ - in the parts of PREFIX")
    return SecretStr(parts.geturl())


def _endpoint(value: object) -> SecretStr:
    """Parse the URL of a server. The value is masked in errors, since it may contain credentials."""
    rule = "must be https://HOST or http://HOST, with :PORT and a path if needed"
    parts = split_url(value, rule, _NO_CREDENTIALS)
    if parts.scheme not in ("http", "https"):
        raise ValueError(rule)
    return SecretStr(parts.geturl().rstrip("/"))


class ObjectTierSettings(ServerSettings):
    """An entry of TIERS of type `object`. Only age bounds it, see docs/tiers.md."""

    place = "a bucket"

    url: Annotated[SecretStr, BeforeValidator(_url)] = Field(
        description="`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`"
    )
    endpoint: Annotated[SecretStr | None, BeforeValidator(_endpoint)] = Field(
        default=None, description="URL of the server, if not the one of AWS, Google or Azure"
    )
    region: Word | None = Field(default=None, description="region of an S3 bucket")
    account: Word | None = Field(default=None, description="storage account of Azure")
    credentials_file: FilePath | None = Field(
        default=None, description="file with credentials, read again for new requests to S3 and Azure"
    )
    profile: Word = Field(default="default", description="section of an S3 credentials_file")
    ca_file: FilePath | None = Field(
        default=None, description="certificates that the server's may be verified with, besides the system's"
    )
    requests: Annotated[int, Field(ge=1, le=1024), WHOLE] = Field(
        default=32, description="requests that may be under way at once"
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.ttl_s is None:
            raise ValueError("ttl_s is missing: without it nothing bounds the tier")
        if self.scheme == "az" and self.account is None:
            raise ValueError("url=az://... needs account, the name of the storage account")
        if self.scheme != "az" and self.account is not None:
            raise ValueError("account is for az:// only")
        if self.scheme != "s3" and (self.region is not None or self.profile != "default"):
            raise ValueError("region and profile are for s3:// only")
        if self.profile != "default" and self.credentials_file is None:
            raise ValueError("profile needs credentials_file")
        return self

    @property
    def scheme(self) -> str:
        """`s3`, `gs` or `az`."""
        return urlsplit(self.url.get_secret_value()).scheme

    @property
    def bucket(self) -> str:
        """Name of the bucket, or of Azure's container."""
        return urlsplit(self.url.get_secret_value()).netloc

    @property
    def prefix(self) -> str:
        """First part of all names of objects, without a slash at its end."""
        return urlsplit(self.url.get_secret_value()).path.strip("/") or DEFAULT_PREFIX
