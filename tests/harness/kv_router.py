"""A router that follows KV events over ZMQ by vLLM's protocol, and keeps an index of blocks by medium."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Index = dict[str | None, dict[tuple[int, Any], Any]]


class Router:
    """A subscriber that requests the batches that it missed.

    `AllBlocksCleared` has no medium. `index` forgets all media then, and `patient` only the device's.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, batch_type: type, hwm: int = 0) -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, hwm)
        self._live.connect(endpoint)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._missed = self._context.socket(zmq.DEALER)
        self._missed.connect(replay_endpoint)
        self._decoder = msgspec.msgpack.Decoder(batch_type)
        self._next = 0
        self.events: list[Any] = []
        self.index: Index = {}
        self.patient: Index = {}
        self.num_rebuilds = 0

    def close(self) -> None:
        self._live.close(0)
        self._missed.close(0)
        self._context.term()

    def catch_up(self, last: int) -> None:
        """Apply all batches up to this one."""
        while self._next <= last:
            if not self.receive():
                self.replay()

    def receive(self, timeout_ms: int = 100) -> bool:
        """Apply the next batch, and those missed before it. False if none comes."""
        if not self._live.poll(timeout_ms):
            return False
        _, number, payload = self._live.recv_multipart()
        if int.from_bytes(number, "big") > self._next:
            self.replay()
        self._apply(number, payload)
        return True

    def held(self, medium: str) -> set[Any]:
        """Hashes of the blocks in one place."""
        return {block_hash for _, block_hash in self.index.get(medium, ())}

    def stored(self, medium: str = "CPU") -> list[Any]:
        return [event for event in self.events if type(event).__name__ == "BlockStored" and event.medium == medium]

    def replay(self) -> None:
        """Request the batches from the next one on, and apply them."""
        self._missed.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._missed.poll(10_000), "the engine does not answer a request for missed batches"
            *_, number, payload = self._missed.recv_multipart()
            if number == END_OF_REPLAY:
                return
            if int.from_bytes(number, "big") > self._next:
                # Removals may be among the batches that nothing brings any more.
                self.num_rebuilds += 1
                self.index.clear()
                self.patient.clear()
                self._next = int.from_bytes(number, "big")
            self._apply(number, payload)

    def _apply(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") != self._next:
            return
        self._next += 1
        for event in self._decoder.decode(payload).events:
            self.events.append(event)
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.index.clear()
                self.patient.pop("GPU", None)
            for index in (self.index, self.patient):
                for block_hash in getattr(event, "block_hashes", ()):
                    block = event.group_idx, block_hash
                    if kind == "BlockStored":
                        index.setdefault(event.medium, {})[block] = event
                    else:
                        index.get(event.medium, {}).pop(block, None)
