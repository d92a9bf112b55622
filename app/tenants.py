"""Tenants in what operators send: named by a glob of their digest, or by their cache salt, which is kept nowhere."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvferry.core.keys import TENANT_HEX_DIGITS, tenant_digest
from kvferry.core.rules import MAX_GLOB_CHARS

MAX_SALT_CHARS = 1024
_DIGEST_GLOB = re.compile(r"[0-9a-f*?\[\]!-]+", re.ASCII)


def is_digest_glob(text: str) -> bool:
    """Whether a text is made of hex digits and wildcards only; what is not may be a salt in the wrong place."""
    return _DIGEST_GLOB.fullmatch(text) is not None


def _digest_glob(text: str) -> str:
    if not is_digest_glob(text):
        raise ValueError("must be a glob of a digest: hex digits in lower case and wildcards; a salt is a cache_salt")
    return text


DigestGlob = Annotated[
    str,
    Field(min_length=1, max_length=MAX_GLOB_CHARS, json_schema_extra={"pattern": f"^{_DIGEST_GLOB.pattern}$"}),
    AfterValidator(_digest_glob),
]


def _encodable(salt: SecretStr) -> SecretStr:
    if any("\ud800" <= char <= "\udfff" for char in salt.get_secret_value()):
        raise ValueError("is not valid Unicode")
    return salt


CacheSalt = Annotated[SecretStr, Field(min_length=1, max_length=MAX_SALT_CHARS), AfterValidator(_encodable)]


class TenantMatch(BaseModel):
    """Conditions of which one may name a tenant, in either way."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "not": {
                "required": ["tenant", "cache_salt"],
                "properties": {"tenant": {"type": "string"}, "cache_salt": {"type": "string"}},
            }
        },
    )
    tenant: DigestGlob | None = Field(
        default=None, description=f"glob of the tenant's digest ({TENANT_HEX_DIGITS} hex digits); `?*` is any tenant"
    )
    cache_salt: CacheSalt | None = Field(
        default=None, description="the tenant's cache salt, in place of `tenant`: it becomes the digest and is not kept"
    )

    @model_validator(mode="after")
    def _one_tenant(self) -> Self:
        if self.tenant is not None and self.cache_salt is not None:
            raise ValueError("give tenant or cache_salt, not both")
        return self

    def tenant_glob(self) -> str | None:
        """The glob of the digest; of a salt, the digest itself. None where no tenant is asked for."""
        return self.tenant if self.cache_salt is None else tenant_digest(self.cache_salt.get_secret_value())
