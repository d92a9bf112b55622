"""Batches of KV events over ZMQ, in the format of vLLM's publisher. Needs the packages of the extra `zmq`.

A PUB socket sends each batch as three frames: topic, number (8 bytes, big-endian) and the batch in msgpack.
A ROUTER socket answers a request with a number by the kept batches from this one on, and an end with the number -1.
A subscriber that is slower than the engine loses batches, which it can request again. Answers are sent as fast as their
subscribers read them, so that one that requests and does not read takes a limited amount of memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
_MAX_QUEUED = 128
"""Batches of answers that are queued for one subscriber."""
_STALL_S = 5.0
"""Without progress for this time, an answer that replaces batches is given up, so that others get theirs."""
_ANSWER_POLL_S = 0.001
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


@dataclass(slots=True)
class _Answer:
    """Batches that remain to be sent, by number, and the end. They are `replacing` kept ones, or None: kept ones."""

    next_number: int
    end_number: int
    replacing: Sequence[EventBatch] | None
    progressed_s: float


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
        self._answers: dict[bytes, _Answer] = {}
        self._has_progressed = False
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
        # Before the bind, after which it changes nothing.
        socket.setsockopt(zmq.SNDHWM, min(_MAX_QUEUED, self._max_kept) if kind == zmq.ROUTER else self._max_kept)
        if kind == zmq.ROUTER:
            # Otherwise it drops what the queue of a subscriber has no space for.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
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

        Other messages are ignored. A request ends the answer to an earlier one of the same subscriber. While answers
        make progress, the wait is short.
        """
        timeout_s = _ANSWER_POLL_S if self._has_progressed else timeout_s
        if self._requests is None or not self._requests.poll(int(timeout_s * 1000)):
            return []
        found: list[tuple[bytes, int]] = []
        while len(found) < _MAX_REQUESTS and self._requests.poll(0):
            frames = self._requests.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and not frames[1] and len(frames[2]) == _NUMBER_BYTES:
                self._answers.pop(frames[0], None)
                found.append((frames[0], int.from_bytes(frames[2], "big")))
            else:
                _log.debug("kv events: request for missed batches is malformed: frames: %d", len(frames))
        return found

    @property
    def answers_requests(self) -> bool:
        """Whether missed batches can be requested."""
        return self._requests is not None

    @property
    def is_replacing(self) -> bool:
        """Whether an answer that replaces batches is being sent."""
        return any(answer.replacing is not None for answer in self._answers.values())

    def answer(self, subscriber: bytes, first_number: int) -> None:
        """Begin to send the kept batches from a number on, and the end, to one subscriber."""
        first = min(max(first_number, self.first_kept), self.next_number)
        self._answers[subscriber] = _Answer(first, self.next_number, None, time.monotonic())

    def answer_with(self, subscriber: bytes, batches: Sequence[EventBatch]) -> None:
        """Begin to send batches in place of as many that were sent last, which have the same effect, and the end."""
        first = self.next_number - len(batches)
        self._answers[subscriber] = _Answer(first, self.next_number, batches, time.monotonic())

    def send_answers(self) -> list[tuple[bytes, int]]:
        """Send of each answer what its subscriber has space for. Never waits.

        Return the subscribers of those whose next batch is not kept any more, and its number.
        """
        self._has_progressed = False
        behind: list[tuple[bytes, int]] = []
        for subscriber, answer in list(self._answers.items()):
            if answer.replacing is None and answer.next_number < min(self.first_kept, answer.end_number):
                behind.append((subscriber, answer.next_number))
                del self._answers[subscriber]
            elif self._has_ended(subscriber, answer):
                del self._answers[subscriber]
        return behind

    def _has_ended(self, subscriber: bytes, answer: _Answer) -> bool:
        """Send what there is space for; return whether the answer is sent, or has to be given up."""
        num_left = answer.end_number - answer.next_number
        payloads: Iterable[bytes]
        if answer.replacing is None:
            first = answer.next_number - self.first_kept
            payloads = islice(self._kept, first, first + num_left)
        else:
            payloads = map(self._encoder.encode, answer.replacing[len(answer.replacing) - num_left :])
        try:
            for payload in payloads:
                self._send_to(subscriber, self._topic, answer.next_number.to_bytes(_NUMBER_BYTES, "big"), payload)
                answer.next_number += 1
                answer.progressed_s = time.monotonic()
                self.num_replayed += answer.replacing is None
                self._has_progressed = True
            self._send_to(subscriber, b"", _END, b"")
        except zmq.Again:
            return answer.replacing is not None and time.monotonic() - answer.progressed_s > _STALL_S
        except zmq.ZMQError:
            _log.debug("kv events: subscriber left before its answer was sent")
        return True

    def _send_to(self, subscriber: bytes, *frames: bytes) -> None:
        if self._requests is not None:
            self._requests.send_multipart((subscriber, b"", *frames), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets, within `CLOSE_MS`."""
        self._context.destroy(linger=CLOSE_MS)
