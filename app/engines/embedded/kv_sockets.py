"""Batches of KV events over ZMQ, in the format of vLLM's publisher. Needs the packages of the extra `zmq`.

A PUB socket sends each batch as three frames: topic, number (8 bytes, big-endian) and the batch in msgpack.
A ROUTER socket answers a request with a number by the kept batches from this one on, and an end with the number -1.
A subscriber that is slower than the engine loses batches, which it can request again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import zmq

from kvferry.core.errors import StartError

_log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 64 << 20
"""Bytes of all batches that are kept for subscribers that missed them."""
CLOSE_MS = 500
"""Batches that are not sent by then are lost."""
_MAX_REQUESTS = 16
"""Requests for missed batches that are answered in one call."""
_MAX_WAITING_REQUESTS = 1000
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks of one prefix that entered a place. `extra_keys` has an entry a block."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that left a place."""

    block_hashes: list[_Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks of the engine are gone, in every place."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events that are sent together."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class KVEventSockets:
    """The sockets of one publisher, and the batches that it keeps. Thread: one, after its creation."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, max_kept: int) -> None:
        """Bind the sockets.

        Args:
            endpoint: Address of the batches.
            replay_endpoint: Address of the requests for missed batches; None without them.
            topic: The first frame of each batch.
            max_kept: The most batches to keep; as many may wait for one subscriber.

        Raises:
            StartError: An address cannot be used.
        """
        self.next_number = time.time_ns() // 1000
        """Number of the next batch. A later process has higher ones, so that subscribers see a gap, and ask for it."""
        self.num_replayed = 0
        """Kept batches that were sent again."""
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._max_kept = max_kept
        self.endpoints: list[str] = []
        """Address of the batches, and of the requests for missed ones if there is one, with the ports in use."""
        self._context = zmq.Context()
        try:
            self._batches = self._bind(zmq.PUB, endpoint, "KVFERRY_KV_EVENTS_ENDPOINT")
            self._requests = (
                None
                if replay_endpoint is None
                else self._bind(zmq.ROUTER, replay_endpoint, "KVFERRY_KV_EVENTS_REPLAY_ENDPOINT")
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, endpoint: str, setting: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # Before the bind, after which it changes nothing. A ROUTER socket would drop the rest of an answer.
        socket.setsockopt(zmq.SNDHWM, 0 if kind == zmq.ROUTER else self._max_kept)
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING_REQUESTS)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(f"{setting}={endpoint}: cannot listen there: {error.strerror}; set another one") from error
        host, _, port = endpoint.rpartition(":")
        if port in ("*", "0"):
            endpoint = f"{host}:{socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
        self.endpoints.append(endpoint)
        return socket

    @property
    def first_kept(self) -> int:
        """Number of the oldest batch that is kept."""
        return self.next_number - len(self._kept)

    def send(self, batch: EventBatch) -> None:
        """Send a batch, and keep it. Never waits: what a subscriber has no space for is lost to it."""
        payload = self._encoder.encode(batch)
        number = self.next_number.to_bytes(_NUMBER_BYTES, "big")
        self.next_number += 1
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > self._max_kept or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
        self._batches.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def wait_for_requests(self, timeout_s: float) -> list[tuple[bytes, int]]:
        """Wait this long for requests for missed batches; return the subscribers, and the first number of each.

        Other messages are ignored.
        """
        if self._requests is None or not self._requests.poll(int(timeout_s * 1000)):
            return []
        found: list[tuple[bytes, int]] = []
        while len(found) < _MAX_REQUESTS and self._requests.poll(0):
            frames = self._requests.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and not frames[1] and len(frames[2]) == _NUMBER_BYTES:
                found.append((frames[0], int.from_bytes(frames[2], "big")))
            else:
                _log.debug("kv events: request for missed batches is malformed: frames: %d", len(frames))
        return found

    @property
    def answers_requests(self) -> bool:
        """Whether missed batches can be requested."""
        return self._requests is not None

    def answer(self, subscriber: bytes, first_number: int) -> None:
        """Send the kept batches from a number on, and the end, to one subscriber. Never waits."""
        first = min(max(first_number, self.first_kept), self.next_number)
        self.num_replayed += self.next_number - first
        self._answer(subscriber, first, islice(self._kept, first - self.first_kept, None))

    def answer_with(self, subscriber: bytes, batches: Sequence[EventBatch]) -> None:
        """Send batches in place of as many that were sent last, which have the same effect, and the end."""
        self._answer(subscriber, self.next_number - len(batches), map(self._encoder.encode, batches))

    def _answer(self, subscriber: bytes, first_number: int, payloads: Iterable[bytes]) -> None:
        if self._requests is None:
            return
        for number, payload in enumerate(payloads, first_number):
            frames = (subscriber, b"", self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload)
            self._requests.send_multipart(frames, zmq.NOBLOCK)
        self._requests.send_multipart((subscriber, b"", b"", _END, b""), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets, within `CLOSE_MS`."""
        self._context.destroy(linger=CLOSE_MS)
