"""A simulated worker for vLLM's scheduler: device, host pool, copies and model.

A cell of KV holds a hash of all tokens up to its own, in draft layers (group E) up to the next one. Every cell that a
step reads is compared with its tokens. Copies end some steps after their submission.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvferry.app.engines.vllm.layout import NULL_BLOCK
from kvferry.app.engines.vllm.metadata import StepMetadata, WorkerReports
from kvferry.core.engine_api import StoreMode
from kvferry.core.transfers import Direction, TransferJob, TransferResult
from tests.vllm import fabricated as fake
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

BLOCK = 4
WINDOW = 9
VOCABULARY = 23
SPECS = {
    "F": replace(fake.FULL, block_size=BLOCK),
    "W": replace(fake.WINDOW, block_size=BLOCK, sliding_window=WINDOW),
    "E": replace(fake.FULL, block_size=BLOCK),
}
MODULUS = (1 << 61) - 1
LOADING, ERASED = -1, -2
"""Cells of blocks that are being loaded, and of a device that slept."""


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine with a group for each letter of `groups`, and its faults.

    F: full attention, W: sliding window, E: full attention with layers of an EAGLE drafter.
    """

    groups: str
    mode: StoreMode
    is_async: bool = False
    num_drafts: int = 0
    num_blocks: int = 60
    num_slots: int = 300
    blocks_per_slot: int = 1
    failing_share: float = 0.0
    """Of the copies."""
    reset_share: float = 0.0
    """Of the steps: the pool is reset while requests run."""
    abort_share: float = 0.02
    retention_interval: int | None = 0
    """Distance of the points whose windows stay findable, in tokens; None for all."""
    num_modules: int = 1
    """Tokens behind each one that the draft layers read: one with EAGLE, one for each module with MTP."""


def append_cells(cells: list[int], tokens: Iterable[int]) -> list[int]:
    """Append the cells of tokens that follow others."""
    for token in tokens:
        cells.append(((cells[-1] if cells else 7) * 1000003 + token + 11) % MODULUS)
    return cells


def draft_cells(cells: Sequence[int], tokens: Sequence[int], num_modules: int) -> list[int]:
    """Return the draft layers' cells of the first tokens of `tokens`, with the tokens behind each that there are."""
    behind = [tokens[at + 1 : at + 1 + num_modules] for at in range(len(cells))]
    return [
        (cell + sum(31**n * token for n, token in enumerate(after, 1))) % MODULUS
        for cell, after in zip(cells, behind, strict=True)
    ]


def next_token(cell: int) -> int:
    """Return what the model samples at the last token of a context."""
    return (cell * 2654435761 >> 17) % VOCABULARY


class Device:
    """KV blocks of the device and of the host. The cells of a group differ from those of others by its number."""

    def __init__(self, num_blocks: int) -> None:
        self.cells = np.full((num_blocks, BLOCK), ERASED, dtype=np.int64)
        self.slots: dict[tuple[int, int], np.ndarray] = {}
        """Blocks of the host by slot and place in it."""

    def copy(self, job: TransferJob) -> None:
        for run in job.runs:
            places = zip(run.slots.tolist(), run.numbers.tolist(), strict=True)
            for block, place in zip(run.block_ids.tolist(), places, strict=True):
                if job.direction is Direction.STORE:
                    self.slots[place] = self.cells[block].copy()
                else:
                    self.cells[block] = self.slots[place]

    def write(self, table: Sequence[int], group: int, start: int, cells: Sequence[int]) -> None:
        positions = np.arange(start, start + len(cells))
        blocks = np.asarray(table)[positions // BLOCK]
        kept = blocks != NULL_BLOCK
        self.cells[blocks[kept], positions[kept] % BLOCK] = (np.array(cells, dtype=np.int64) + group)[kept]

    def find_wrong(self, table: Sequence[int], group: int, first: int, cells: Sequence[int]) -> list[int]:
        """Return the positions from `first` on that do not hold these cells."""
        positions = np.arange(first, first + len(cells))
        blocks = np.asarray(table)[positions // BLOCK]
        expected = np.array(cells, dtype=np.int64) + group
        wrong = (blocks == NULL_BLOCK) | (self.cells[blocks, positions % BLOCK] != expected)
        return [int(position) for position in positions[wrong]]


@dataclass(slots=True)
class Running:
    """A request on the worker, which with asynchronous scheduling is ahead of the scheduler."""

    tokens: list[int]
    num_computed: int
    cells: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    first: int = 0
    """The first token that was computed here."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's part of one step. `context` are its tokens if the step begins or resumes it."""

    request_id: str
    num_computed: int
    num_tokens: int
    num_drafts: int
    tables: tuple[list[int], ...]
    context: list[int] | None


class Worker:
    """Executes the steps: copies, checks what attention reads, writes KV and samples."""

    def __init__(self, setup: Setup, device: Device, choices: random.Random, problems: list[str]) -> None:
        self._setup, self._device, self._choices, self._problems = setup, device, choices, problems
        self._running: dict[str, Running] = {}
        self._jobs: list[tuple[int, TransferJob, bool]] = []
        self._num_steps = 0
        self.num_copied = dict.fromkeys(Direction, 0)
        self.stale_drafts: list[str] = []
        """Reads of draft cells that were computed before another token."""

    def execute(self, metadata: StepMetadata, chunks: Sequence[Chunk]) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        self._num_steps += 1
        for job in metadata.stores_ahead:
            self._device.copy(job)
            self._submit(job, is_copied=True)
        sampled = {chunk.request_id: self._compute(chunk) for chunk in chunks}
        for job in metadata.loads:
            for run in job.runs:
                self._device.cells[run.block_ids] = LOADING
            self._submit(job)
        for job in metadata.stores:
            is_copied = self._choices.random() < 0.3
            if is_copied:
                self._device.copy(job)
            self._submit(job, is_copied)
        report = self._end_jobs(metadata.failed_loads)
        drafted = [name for name in sampled if self._running[name].drafts]
        drafts = DraftTokenIds(drafted, [list(self._running[name].drafts) for name in drafted])
        if not chunks:
            return ModelRunnerOutput.with_kv_conn_output_only(report), drafts
        places = {name: place for place, name in enumerate(sampled)}
        output = ModelRunnerOutput(list(sampled), places, list(sampled.values()), kv_connector_output=report)
        return output, drafts

    def _submit(self, job: TransferJob, is_copied: bool = False) -> None:
        self._jobs.append((self._num_steps + self._choices.choice((0, 1, 2, 5)), job, is_copied))

    def _end_jobs(self, failed_loads: Iterable[str]) -> KVConnectorOutput:
        failed, results = set(failed_loads), []
        received, jobs, self._jobs = set(failed), self._jobs, []
        for due, job, is_copied in jobs:
            if due > self._num_steps:
                self._jobs.append((due, job, is_copied))
                continue
            error = "injected" if self._choices.random() < self._setup.failing_share else None
            if not is_copied and error is None:
                self._device.copy(job)
            self.num_copied[job.direction] += error is None
            results.append(TransferResult(job.job_id, 0, error))
            if job.direction is Direction.LOAD:
                received.add(job.request_id)
                failed.update([job.request_id] if error else [])
        return KVConnectorOutput(
            finished_recving=received or None,
            failed_recving=failed,
            kv_connector_worker_meta=WorkerReports(results) if results else None,
        )

    def _compute(self, chunk: Chunk) -> list[int]:
        """Compute a chunk and return the accepted drafts and the token after them, if it ends the context."""
        if chunk.context is not None:
            cells = append_cells([], chunk.context)
            tokens, computed = list(chunk.context), chunk.num_computed
            self._running[chunk.request_id] = Running(tokens, computed, cells, first=computed)
        running = self._running[chunk.request_id]
        start, drafts = running.num_computed, (running.drafts + [0] * chunk.num_drafts)[: chunk.num_drafts]
        end = start + chunk.num_tokens - chunk.num_drafts
        written = append_cells(running.cells[:end], drafts)[start:]
        for group, (letter, table) in enumerate(zip(self._setup.groups, chunk.tables, strict=True)):
            if letter == "E":
                expected = draft_cells(running.cells[:start], running.tokens, self._setup.num_modules)
                settled = expected[: max(len(running.tokens) - self._setup.num_modules, 0)]
                wrong = self._device.find_wrong(table, group, 0, settled)
                self.stale_drafts += [f"{chunk.request_id}: {wrong}"] if wrong else []
                continue
            first = 0 if letter == "F" else max(0, start - WINDOW + 1)
            wrong = self._device.find_wrong(table, group, first, running.cells[first:start])
            if wrong:
                self._problems.append(f"{chunk.request_id} read wrong cells of group {group} ({letter}): {wrong}")
            self._device.write(table, group, start, written)
        if end < len(running.tokens):
            running.num_computed = end
            self._write_drafts(chunk, running, start)
            return []
        sampled: list[int] = []
        cells = running.cells[:end]
        for draft in [*drafts, None]:
            sampled.append(next_token(cells[-1]))
            append_cells(cells, sampled[-1:])
            if draft != sampled[-1]:
                break
        running.tokens += sampled
        running.cells, running.num_computed = cells, len(cells) - 1
        running.drafts = self._draft(cells)
        self._write_drafts(chunk, running, start)
        return sampled

    def _write_drafts(self, chunk: Chunk, running: Running, start: int) -> None:
        """Write the draft layers' cells, again those that were computed with drafts for the tokens behind them."""
        num_modules = self._setup.num_modules
        first = max(start - num_modules + 1, running.first)
        for group, (letter, table) in enumerate(zip(self._setup.groups, chunk.tables, strict=True)):
            if letter == "E":
                tokens = running.tokens + running.drafts
                cells = draft_cells(running.cells[: running.num_computed], tokens, num_modules)
                self._device.write(table, group, first, cells[first:])

    def _draft(self, cells: list[int]) -> list[int]:
        """Guess the next tokens, of which some are wrong."""
        guessed = cells[-1:]
        drafts: list[int] = []
        for _ in range(self._setup.num_drafts):
            is_right = self._choices.random() < 0.6
            drafts.append(next_token(guessed[-1]) if is_right else self._choices.randrange(VOCABULARY))
            append_cells(guessed, drafts[-1:])
        return drafts
