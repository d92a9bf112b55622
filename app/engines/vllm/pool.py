"""The host pool of an engine's ranks: one mapping that all of them share, rows slots and columns ranks.

Nobody finds it by name once every rank has mapped it, so that it goes with the last of them, however they end.
"""

from __future__ import annotations

import hashlib
from typing import Any

from app.engines.vllm.sizing import PoolSize
from cuda_ops.backing import SHARED_MEMORY, SharedFile
from cuda_ops.host_pool import HostPool
from cuda_ops.limits import NotEnoughMemory

_DIGITS = 24


def map_pool(size: PoolSize, config: Any, rank: int) -> HostPool:
    """This rank's view of the pool. Raises `NotEnoughMemory`, on every rank if one of them cannot map it."""
    if size.num_ranks == 1:
        return HostPool(size.num_slots, size.rank_slot_bytes)
    pool: HostPool | None = None
    error: str | None = None
    file: SharedFile | None = None
    try:
        file = SharedFile(SHARED_MEMORY / _name(config))
        pool = HostPool(size.num_slots, size.rank_slot_bytes, backing=file, num_ranks=size.num_ranks, rank=rank)
    except (OSError, NotEnoughMemory) as problem:
        error = f"rank {rank}: {problem}"
    errors = [found for found in _of_all_ranks(error) if found is not None]
    if file is not None:
        file.unlink()
    if pool is not None and not errors:
        return pool
    if pool is not None:
        pool.close()
    raise NotEnoughMemory("; ".join(errors))


def _name(config: Any) -> str:
    """Alike on all ranks of an engine, and on no others: vLLM draws the engine's id when it reads its configuration."""
    parts = (config.kv_transfer_config.engine_id, config.instance_id, config.parallel_config.data_parallel_index)
    return f"kvferry-{hashlib.sha256(repr(parts).encode()).hexdigest()[:_DIGITS]}"


def _of_all_ranks(mine: str | None) -> list[str | None]:
    """What each rank has to say. Nobody goes on before all have spoken."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    found: list[str | None] = [None] * group.world_size
    dist.all_gather_object(found, mine, group=group.cpu_group)
    return found
