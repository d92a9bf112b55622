"""What tiers bring into a kept pool is sealed where tiers work: in the engine-core process, for every rank, and on a
thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvferry.core.transfers import SlotLabels
from kvferry.cuda_ops.slot_headers import SlotHeaders

_log = logging.getLogger(__name__)

CLOSE_S = 10.0


class EngineFillings:
    """A `kvferry.cuda_ops.kept_pool.Fillings`. Any thread, but for `close`."""

    def __init__(self, headers: Sequence[SlotHeaders]) -> None:
        """`headers` are those of each rank."""
        self._headers = headers
        self._thread = ThreadPoolExecutor(1, "kvferry-seal")
        self._last: Future[None] | None = None

    def begin_filling(self, labels: SlotLabels) -> None:
        """See `kvferry.cuda_ops.kept_pool.Fillings`. Thread: any but the engine's."""
        for headers in self._headers:
            headers.begin(labels)

    def end_filling(self, labels: SlotLabels) -> None:
        """See `kvferry.cuda_ops.kept_pool.Fillings`."""
        try:
            self._last = self._thread.submit(self._seal, labels)
        except RuntimeError as error:
            _log.warning("%d blocks of a tier are not sealed, so a restart loses them: %s", len(labels.slots), error)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was filled by now is sealed; whether that came true in time."""
        last = self._last
        return last is None or bool(wait([last], timeout_s).done)

    def close(self) -> None:
        """Seal what was filled, within its time."""
        if not self.settle(CLOSE_S):
            _log.warning("blocks of tiers were not sealed in time: a restart loses them")
        self._thread.shutdown(cancel_futures=True)

    def _seal(self, labels: SlotLabels) -> None:
        try:
            for headers in self._headers:
                headers.seal(labels)
        except Exception:  # noqa: BLE001 - these blocks are lost to a restart, the next ones need not be
            _log.exception("slots could not be sealed")
