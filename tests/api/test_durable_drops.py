"""Resets and deletions with a pool that outlives its process: answered once a restart cannot undo them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvferry.core.keys import make_keys
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from tests.harness.loop_engine import BLOCK_BYTES, LoopRequest
from tests.harness.loop_service import Service, start_service
from tests.harness.waiting import DEADLINE_S, wait_until

NUM_SLOTS = 256
RESET = "/admin/v1/reset"
BLOCKS = "/admin/v1/blocks"


@contextmanager
def kept(folder: Path) -> Iterator[tuple[Service, HeaderWriter]]:
    """A service, and the writer of its pool, which writes nothing before it is started."""
    file = KeptFile(folder / "api.pool", PoolShape(NUM_SLOTS, BLOCK_BYTES, 1, NUM_SLOTS), {"model": "m"})
    writer = HeaderWriter(file)
    try:
        with start_service(folder, num_slots=NUM_SLOTS, header_queue=writer) as service:
            yield service, writer
    finally:
        writer.close()
        file.close()


@pytest.mark.parametrize("body", [{}, {"match": {"request": "one"}}])
def test_a_reset_answers_200_once_invalidations_are_written(tmp_path: Path, body: dict[str, object]) -> None:
    with kept(tmp_path) as (service, writer), service.client() as client:
        service.engine.answer(LoopRequest("one", 160, seed=1))
        service.settle()
        answer = client.post(RESET, json=body | {"drain_timeout_s": 0})
        assert (answer.status_code, answer.json()["pending_jobs"]) == (202, 1)
        assert answer.json()["dropped_blocks"] == 10
        dropped = writer.file.headers(0)["dropped_generation"]
        assert (writer.file.min_epoch, int(dropped.max())) == (0, 0)
        writer.start()
        answer = client.post(RESET, json=body)
        assert (answer.status_code, answer.json()["pending_jobs"]) == (200, 0)
        assert (writer.file.min_epoch, int((dropped > 0).sum())) == ((0, 10) if body else (2, 0))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_deletion_answers_once_invalidations_are_written(tmp_path: Path, is_there: bool) -> None:
    with kept(tmp_path) as (service, writer), service.client() as client, ThreadPoolExecutor(1) as pool:
        request = LoopRequest("one", 64, seed=1)
        block = make_keys(request.block_hashes, 0)[0].hex()
        service.engine.answer(request)
        service.settle()
        if not is_there:
            # As an eviction of the block would leave it.
            service.engine.offload.resets.drop_block(bytes.fromhex(block), 1.0)
        deleting = pool.submit(client.delete, f"{BLOCKS}/{block}")
        with service.client() as other:
            wait_until(lambda: other.get(f"{BLOCKS}/{block}").status_code == 404, "the block is not found")
            assert not deleting.done()
        writer.start()
        answer: httpx.Response = deleting.result(DEADLINE_S)
        assert answer.status_code == (204 if is_there else 404)
        assert int((writer.file.headers(0)["dropped_generation"] > 0).sum()) == 1
