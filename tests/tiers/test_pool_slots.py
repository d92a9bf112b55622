"""A tier reads and writes the very bytes of the pool's slots, of one rank or of several."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.app.tiers.opening import PoolSlots
from kvferry.cuda_ops.pool.host_pool import HostPool


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_views_are_the_pools_own_bytes(num_ranks: int) -> None:
    pool = HostPool(5, 8192, num_ranks=num_ranks)
    slots = PoolSlots(pool)
    for rank, view in enumerate(slots.views(3, 100 * num_ranks)):
        assert len(view) == 100
        view[:] = rank + 1
    for rank in range(num_ranks):
        row = pool.row(3)[rank]
        assert (row[:100] == rank + 1).all()
        assert not row[100:].any()
        assert not pool.row(2)[rank].any()
    pool.row(3)[0][:] = 9
    assert (np.concatenate(slots.views(3, 8192 * num_ranks))[:8192] == 9).all()
    pool.close()


def test_a_length_that_no_block_can_have_is_refused() -> None:
    pool = HostPool(2, 4096, num_ranks=2)
    slots = PoolSlots(pool)
    for num_bytes in (3, 2 * 4096 + 2, -2):
        with pytest.raises(ValueError, match="no block of 2 ranks"):
            slots.views(0, num_bytes)
    pool.close()
