"""Tier type `mooncake`: what it needs on this machine, and how a tier is opened."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_store import TierContext, TierRefused
from kvferry.app.tiers.mooncake.settings import MooncakeTierSettings
from kvferry.app.tiers.mooncake.store import MooncakeStore

_PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Libraries of the system that the client is linked with, and the Debian packages that contain them."""


class MooncakeTier:
    """Blocks as objects in a Mooncake Store, which engines with the same fingerprint share."""

    Settings = MooncakeTierSettings

    @staticmethod
    def open(settings: MooncakeTierSettings, context: TierContext) -> MooncakeStore:
        """Return a store whose client is started by its probe. Raises `TierRefused`."""
        MooncakeTier.check(settings, context.slot_bytes)
        return MooncakeStore(settings, context)

    @staticmethod
    def check(settings: TierSettings, slot_bytes: int | None) -> None:
        """Raise `TierRefused` where the client or its libraries are not installed. The client is not loaded here."""
        prefix = f"KVFERRY_TIERS: tier {settings.name}: "
        if find_spec("mooncake") is None:
            raise TierRefused(f"{prefix}its client is not installed; pip install 'kvferry[mooncake]'")
        packages = missing_packages()
        if packages:
            raise TierRefused(f"{prefix}libraries of its client are missing; apt-get install {' '.join(packages)}")


def missing_packages() -> list[str]:
    """Return the Debian packages of the libraries that cannot be loaded."""
    return [package for library, package in _PACKAGES.items() if _is_missing(library)]


def _is_missing(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False
