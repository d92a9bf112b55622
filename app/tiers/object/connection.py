"""Access to a bucket: clients with their credentials, and constant texts for their errors.

`/readyz` needs no token, and messages of the client contain addresses, names of buckets and answers of servers.
Operators therefore see only the texts of this module.
"""

from __future__ import annotations

import configparser
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.object.settings import ObjectTierSettings
from kvferry.app.tiers.shared_values import SettingsRefused, StoreFull

if TYPE_CHECKING:
    from obstore.store import AzureCredential, ClientConfig, RetryConfig, S3Credential

Client = S3Store | GCSStore | AzureStore
CLIENT_ERRORS = (BaseError, OSError, ValueError)
_NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=0)}
_UNREADABLE = "kvferry-credentials-file-unreadable"
"""Message of an exception in a callback, of which the client's error keeps only the message."""


class ConditionFailed(StoreUnavailable):
    """An object is not the one that a conditional write expected."""


class _S3File:
    """Reads credentials in the format of AWS' shared credentials file. They expire at once: each request reads it."""

    def __init__(self, path: Path, profile: str) -> None:
        self._path = path
        self._profile = profile

    def __call__(self) -> S3Credential:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(self._path.read_text(encoding="utf-8"))
            section = dict(parser.items(self._profile))
            key_id, secret = section["aws_access_key_id"], section["aws_secret_access_key"]
        except (OSError, UnicodeError, configparser.Error, KeyError):
            raise PermissionError(_UNREADABLE) from None
        return {
            "access_key_id": key_id,
            "secret_access_key": secret,
            "token": section.get("aws_session_token"),
            "expires_at": datetime.now(UTC),
        }


class _AzureFile:
    """Reads the key of a storage account, or a shared access signature. They expire at once: each request reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> AzureCredential:
        try:
            text = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError):
            raise PermissionError(_UNREADABLE) from None
        if "sig=" in text:
            return {"sas_token": text.removeprefix("?"), "expires_at": datetime.now(UTC)}
        return {"access_key": text, "expires_at": datetime.now(UTC)}


def connect(settings: ObjectTierSettings) -> Client:
    """Return a client without retries of its own. No request is made. Raises `StoreUnavailable`.

    Without `credentials_file` the client finds credentials as its platform provides them: environment, or role of the
    machine or container.
    """
    try:
        return _connect(settings)
    except CLIENT_ERRORS as error:
        raise unavailable(error) from None


def _connect(settings: ObjectTierSettings) -> Client:
    path = settings.credentials_file
    client, retries = _client_options(settings), _NO_RETRIES
    endpoint = None if settings.endpoint is None else settings.endpoint.get_secret_value()
    given: Any
    if settings.scheme == "s3":
        given = {"region": settings.region, "endpoint": endpoint}
        provider = None if path is None else _S3File(path, settings.profile)
        return S3Store(
            settings.bucket,
            config={name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            client_options=client,
            retry_config=retries,
            credential_provider=provider,
        )
    if settings.scheme == "az":
        given = {"account_name": settings.account} | ({} if endpoint is None else {"endpoint": endpoint})
        return AzureStore(
            settings.bucket,
            config=given,
            client_options=client,
            retry_config=retries,
            credential_provider=None if path is None else _AzureFile(path),
        )
    given = {} if endpoint is None else {"base_url": endpoint}
    if path is not None:
        try:
            path.read_bytes()
        except OSError:
            raise PermissionError(_UNREADABLE) from None
        given["application_credentials"] = str(path)
    try:
        return GCSStore(settings.bucket, config=given, client_options=client, retry_config=retries)
    except BaseError as error:
        # Unlike the other clients, this one reads credentials at once. Its texts quote the file.
        failure = unavailable(error)
        if isinstance(failure, SettingsRefused):
            raise failure from None
        problem = "credentials_file has no credentials of Google: name the JSON file of a service account or of a user"
        if path is None:
            problem = "the credentials of the environment cannot be used; see credentials_file"
        raise SettingsRefused(problem, is_transient=False) from None


def _client_options(settings: ObjectTierSettings) -> ClientConfig:
    endpoint = "" if settings.endpoint is None else settings.endpoint.get_secret_value()
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "timeout": timedelta(seconds=settings.io_timeout_s),
        "allow_http": endpoint.startswith("http://"),
        "user_agent": "kvferry",
    }
    if settings.ca_file is not None:
        try:
            options["root_certificate"] = settings.ca_file.read_bytes()
        except OSError:
            raise SettingsRefused("ca_file cannot be read", is_transient=False) from None
    return options


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
"""The code of an answer, or of one object of a request that removes many."""
_KIND = re.compile(r"\bkind: (\w+)")
_BAD_CREDENTIALS = {
    "AuthenticationFailed",
    "AuthFailure",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_OTHER_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}


def unavailable(error: BaseException) -> StoreUnavailable:
    """Return a failure with a constant text for an exception of the client."""
    if isinstance(error, StoreUnavailable):
        return error
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] or found[2] if (found := _CODE.search(text)) else ""
    if isinstance(error, (AlreadyExistsError, PreconditionError)) or status == 409:
        return ConditionFailed("the state of the namespace is being changed by other engines")
    if isinstance(error, TimeoutError) or _KIND.findall(text)[:1] == ["Timeout"]:
        return StoreUnavailable("the server did not answer in time", is_transient=False)
    if "quota" in code.lower() or code == "XMinioStorageFull" or status == 507:
        return StoreFull("the store is full", is_transient=False)
    denial = _denial(error, text, status, code)
    if denial is not None:
        return SettingsRefused(denial, is_transient=False)
    if status == 429 or status >= 500:
        return StoreUnavailable("the server is overloaded or has failed", is_transient=status != 501)
    if status:
        return StoreUnavailable("the server refused a request", is_transient=False)
    if "HTTP error" in text:
        return StoreUnavailable("the server cannot be reached")
    return StoreUnavailable("the client of the server failed", is_transient=False)


def _denial(error: BaseException, text: str, status: int, code: str) -> str | None:
    """Return what is wrong with credentials, permissions, certificates, the bucket or its region; None for nothing."""
    if _UNREADABLE in text:
        return "credentials_file cannot be read, or has no such profile"
    if "certificate" in text.lower():
        return "TLS with the server failed; see endpoint and ca_file"
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return "no credentials were found; see credentials_file"
    if code in _OTHER_REGION or status in (301, 307) or "BareRedirect" in text:
        return "the bucket is in another region; see region and endpoint"
    if code in _NO_BUCKET:
        return "the bucket does not exist; see url"
    if status == 401 or isinstance(error, UnauthenticatedError) or code in _BAD_CREDENTIALS:
        return "the server refuses the credentials; see credentials_file"
    if status == 403 or code == "AccessDenied" or isinstance(error, PermissionDeniedError):
        return "the server does not permit the credentials an operation that the tier needs"
    return None
