"""Settings of a tier of type `mooncake`."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvferry.app.settings.tiers import ServerSettings
from kvferry.app.settings.types import WHOLE, AnyCase, Host, Name, Size, split_url

PEER_TO_PEER = "P2PHANDSHAKE"
"""What Mooncake calls transfers without a metadata server."""
_MASTER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", re.ASCII)
_DEVICES = re.compile(r"[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*", re.ASCII)


class Protocol(StrEnum):
    """How blocks are moved between hosts."""

    TCP = "tcp"
    RDMA = "rdma"


def _master(value: object) -> str:
    """Parse the address of a master."""
    parts = _MASTER.fullmatch(value.strip()) if isinstance(value, str) else None
    if parts is None or not 0 < int(parts[2]) < 65536:
        raise ValueError("must be HOST:PORT")
    return parts[0]


def _metadata(value: object) -> SecretStr:
    """Parse the URL of a metadata server. The value is masked in errors, since it may contain a password."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if isinstance(text, str) and text.strip() == PEER_TO_PEER:
        return SecretStr(PEER_TO_PEER)
    rule = f"must be {PEER_TO_PEER}, http://HOST:PORT/metadata, etcd://HOST:PORT or redis://HOST:PORT"
    parts = split_url(text, rule, "must not contain a user or password, since URLs end up in logs")
    if parts.scheme not in ("http", "https", "etcd", "redis"):
        raise ValueError(rule)
    return SecretStr(parts.geturl())


def _devices(value: object) -> str:
    """Parse names of network devices."""
    if not isinstance(value, str) or not _DEVICES.fullmatch(value.strip()):
        raise ValueError("must be names of RDMA devices, separated by commas, such as mlx5_0,mlx5_1")
    return value.strip()


class MooncakeTierSettings(ServerSettings):
    """An entry of TIERS of type `mooncake`. The memory that hosts give to the store bounds the tier."""

    place = "a store"
    limits = "segment_bytes of the engines and hosts that give it memory"

    master: Annotated[str, BeforeValidator(_master)] = Field(description="`HOST:PORT` of the master")
    metadata: Annotated[SecretStr, BeforeValidator(_metadata)] = Field(
        default=SecretStr(PEER_TO_PEER),
        description=f"URL of Mooncake's metadata server, or `{PEER_TO_PEER}` for none",
    )
    protocol: Annotated[Protocol, AnyCase] = Field(
        default=Protocol.TCP, description="`tcp` or `rdma`: how blocks are moved between hosts"
    )
    devices: Annotated[str | None, BeforeValidator(_devices)] = Field(
        default=None, description="RDMA devices, separated by commas; those that Mooncake finds, if not given"
    )
    host: Host | None = Field(
        default=None, description="address of this host for the others; the one that reaches the master, if not given"
    )
    segment_bytes: Size | None = Field(
        default=None, description="memory that this engine gives to the store; none, if not given"
    )
    replicas: Annotated[int, Field(ge=1, le=16), WHOLE] = Field(
        default=1, description="hosts that have a copy of each block, if there are as many"
    )
    prefix: Name = Field(default="kvferry", description="first part of all keys in the store")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.ttl_s is not None:
            raise ValueError("ttl_s is no limit of this store, which evicts what was not used for longest")
        if self.devices is not None and self.protocol is not Protocol.RDMA:
            raise ValueError("devices needs protocol=rdma")
        if self.segment_bytes is not None and self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ValueError(f"segment_bytes={self.segment_bytes} must be {MIN_SEGMENT_BYTES} or more")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the master."""
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)


MIN_SEGMENT_BYTES = 16 << 20
