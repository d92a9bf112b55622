"""A Mooncake tier: settings that are refused, and libraries that are missing."""

from __future__ import annotations

import ctypes

import pytest

from kvferry.app.settings.tiers import read_tiers
from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.opening import check_tiers
from tests.harness.mooncake_server import program


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"master": "http://db:50051"}, "master=http://db:50051 must be HOST:PORT"),
        ({"master": "db:0"}, "must be HOST:PORT"),
        ({"master": 5}, "must be HOST:PORT"),
        ({"metadata": "redis://:hunter2@db:6379"}, "metadata=*** must not contain a user or password"),
        ({"metadata": "db:2379"}, "must be P2PHANDSHAKE, http://HOST:PORT/metadata"),
        ({"protocol": "ib"}, "protocol=ib must be 'tcp' or 'rdma'"),
        ({"devices": "mlx5_0"}, "devices needs protocol=rdma"),
        ({"protocol": "rdma", "devices": "mlx5 0"}, "must be names of RDMA devices"),
        ({"segment_bytes": "1MiB"}, "segment_bytes=1048576 must be 16777216 or more"),
        ({"replicas": 0}, "replicas=0 must be"),
        ({"max_bytes": "1GiB"}, "max_bytes cannot be enforced in a store that others write to: set segment_bytes"),
        ({"ttl_s": 60}, "ttl_s is no limit of this store"),
        ({"prefix": "a*"}, "prefix=a* must be 1 to 64 letters"),
        ({"global_segment_size": 1}, "global_segment_size is no field of it"),
    ],
)
def test_wrong_settings_are_refused_without_passwords(change: dict[str, object], words: str) -> None:
    program()
    with pytest.raises(ValueError, match="tier 1") as caught:
        read_tiers([{"type": "mooncake", "master": "db:50051"} | change])
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_missing_libraries_refuse_start_naming_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        if name != "libnuma.so.1":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    entries = read_tiers([{"type": "mooncake", "master": "127.0.0.1:50051", "segment_bytes": "64MiB"}])
    with pytest.raises(TierRefused, match=r"KVFERRY_TIERS: tier mooncake: .*apt-get install libibverbs1 libcurl4$"):
        check_tiers(entries, slot_bytes=None)
