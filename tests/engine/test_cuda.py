"""The embedded engine on CUDA: its answers through that copy engine, and what it refuses where no device is.

The answers are those of a driver over host memory; the tests marked `gpu` need a device.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvferry.app.engines.cuda import CudaDevice
from kvferry.app.serve.process import Process
from kvferry.app.settings import Settings
from kvferry.app.telemetry.logs import LogPipe
from kvferry.core.errors import StartError
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.cuda.driver import CudaDriver, CudaUnavailable
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.engine.test_offload import MAX_TOKENS, SMALL, check_answers_until_preempted, flush_device, settle
from tests.harness.embedded import ask_all, greedy, random_prompts, reference_answer, reference_model, run, until
from tests.harness.fake_cuda import ILLEGAL_ADDRESS, FakeCuda
from tests.harness.offloading import CudaCopies, MakeOffloaded

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(23, 6, 60)


def test_answers_are_the_same_after_the_device_refuses_to_copy(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    cuda = FakeCuda(4)
    offloaded = make_offloaded(cuda=cuda, **SMALL)
    ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
    flush_device(offloaded)
    cuda.poison(ILLEGAL_ADDRESS)
    got = ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
    assert [answer.token_ids for answer in got] == answers
    settle(offloaded)
    assert not offloaded.copies.is_alive()
    assert offloaded.stats.load.failed > 0


def test_pool_is_page_locked_and_unregistered_before_the_device_closes(tmp_path: Path) -> None:
    cuda = FakeCuda()
    side = CudaDevice(torch.device("cuda", 0), CudaDriver(cuda.resolve))
    pool = HostPool(4, 4096, preparation=side.preparation())
    assert pool.is_page_locked
    copies = side.copies(
        # No kernel: Triton's would run on the real device, if there is one, on a stream that it has not.
        DeviceLayout.of_tensors([[torch.zeros(4, 4096, dtype=torch.uint8)]]),
        pool,
        lambda: None,
        tmp_path,
        1,
    )
    assert copies.is_alive()
    copies.close()
    pool.close()
    side.close()
    assert (cuda.registered, cuda.retained) == ({}, 0)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_a_pinned_pool_asks_for_huge_pages() -> None:
    side = CudaDevice(torch.device("cuda", 0), CudaDriver(FakeCuda().resolve))
    pool = HostPool(4, 1 << 20, preparation=side.preparation())
    address, inside, flags = pool.slot(0).ctypes.data, False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags
    pool.close()
    side.close()


def test_a_device_that_the_driver_does_not_have_is_refused() -> None:
    with pytest.raises(CudaUnavailable, match=r"cuda:1 cannot be used for copies .*; set KVFERRY_DEVICE=cpu"):
        CudaDevice(torch.device("cuda", 1), CudaDriver(FakeCuda().resolve))


def test_a_device_that_gives_no_stream_is_refused(tmp_path: Path) -> None:
    cuda = FakeCuda()
    side = CudaDevice(torch.device("cuda", 0), CudaDriver(cuda.resolve))
    cuda.fail("cuStreamCreateWithPriority", ILLEGAL_ADDRESS)
    with pytest.raises(CudaUnavailable, match=r"cuda:0 gives no copy engine .*ILLEGAL_ADDRESS.*set KVFERRY_DEVICE"):
        side.copies(
            DeviceLayout.of_tensors([[torch.zeros(4, 64, dtype=torch.uint8)]]),
            HostPool(4, 64),
            lambda: None,
            tmp_path,
            1,
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_machine_without_a_device_is_refused_with_advice(device: str, tmp_path: Path) -> None:
    settings = Settings(device=device, state_dir=tmp_path)
    with (
        LogPipe(settings) as logs,
        pytest.raises(StartError, match=f"DEVICE={device}: torch sees 0 CUDA devices here; use cpu or auto"),
    ):
        Process(settings, logs)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("below_bytes", [None, 1, 1 << 30], ids=["calibrated", "dma", "kernel"])
@pytest.mark.parametrize("num_slots", [400, 17], ids=["large-pool", "small-pool"])
def test_answers_of_a_device_are_the_same_under_eviction_and_preemption(
    num_slots: int,
    below_bytes: int | None,
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    tmp_path: Path,
) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    offloaded = make_offloaded(num_slots, cuda=CudaCopies(device, tmp_path, below_bytes), device="cuda", **SMALL)
    check_answers_until_preempted(offloaded, prompts, answers)
    offloaded.close()
    device.close()


@pytest.mark.gpu
@needs_device
def test_a_process_on_a_device_restarts_warm_with_the_same_answers(tmp_path: Path) -> None:
    prompt = random_prompts(29, 1, 400)[0]
    seen = []
    for _ in range(2):
        settings = Settings(
            _env_file=None,
            device="cuda",
            dtype="float64",
            state_dir=tmp_path,
            pool_kind="file",
            pool_path=tmp_path / "pool",
            pool_bytes="64MiB",
            load_decision="always",
        )
        with LogPipe(settings) as logs:
            process = Process(settings, logs)
            process.start()
            assert process.service.readiness() == []
            assert process.engine is not None
            [answer] = ask_all(process.engine, [prompt], greedy(MAX_TOKENS))
            run(until(lambda: not process.service.scheduler.has_open_work(), "all transfers have ended"))  # noqa: B023
            seen.append((answer.token_ids, process.service.scheduler.snapshot().prompt_tokens.host_hit))
            process.close()
    assert seen[0] == (reference_answer(reference_model("tiny"), prompt, MAX_TOKENS), 0)
    assert seen[1][0] == seen[0][0]
    assert seen[1][1] == (len(prompt) - 1) // 16 * 16
