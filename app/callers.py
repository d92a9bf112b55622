"""Callers by network address, among which turns and limits are divided."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

_HOST_PREFIX_BITS = 64
"""Prefix of an IPv6 network whose addresses are all one customer's (RFC 6177)."""


@lru_cache(maxsize=4096)
def caller_of(host: str) -> str:
    """Return the caller that a peer address counts as: itself, or the /64 network of an IPv6 address.

    An IPv4 address mapped into IPv6 is the IPv4 address. What is no address, as of a Unix socket, counts as it is.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _HOST_PREFIX_BITS), strict=False))
