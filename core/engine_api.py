"""The interface of core to an engine: views of its requests and of its device blocks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from kvferry.core.keys import Key

BlockTables = Sequence[Sequence[int]]
"""A request's device blocks by group: `tables[g][i]` holds its `i`-th block of group `g`, or the null block.

A device block belongs to one group at a time, and its number is not used in another group meanwhile.
"""


OVERWRITTEN: Key = b""
"""Content of a block that cannot be stored any more. No block is found by this key."""

HashPrompt = Callable[[Sequence[int], str | None, str | None], Sequence[bytes]]
"""Returns the block hashes of a prompt as the engine makes them, given token ids, cache salt and name of the adapter.

Raises `UnknownAdapter`. Thread: any.
"""


class UnknownAdapter(ValueError):
    """The engine does not know an adapter, or does not offload its blocks; the message says which."""


class EngineRequest(Protocol):
    """A request of the engine. Core keeps the reference from its announcement to its end and only reads it.

    `aliases` are the other ids by which clients may know it, most exact first. `tenant` is already a digest.
    `block_hashes` is a live list with one chained hash for each full `hash_block_size` tokens, and grows with decode.
    An engine with priorities has an integer `priority` besides, for policy rules. If the engine ignores hits of a
    request, its `may_load` is False, and its policy forbids loads. If its hashes leave something out that its KV
    depends on, `unhashed` says what, and it is computed without offloading. A request whose trace is sampled has a
    `trace`: a callable that receives its stages as they end, and its view once it has finished, and returns at once.
    An engine whose prompts can be explained by their text has `token_ids` of prompt and answer, final at the end. One
    whose clients name sessions has the id that the client sent as `session`, None or empty for a request without one.
    One that takes KV hints has the types of their actions as `kv_hint_types`.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def lora(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class StoreMode(StrEnum):
    """When blocks are offered: `eager` as they fill, `lazy` when they are about to leave the device."""

    EAGER = "eager"
    LAZY = "lazy"


class DeviceView(Protocol):
    """The engine's device blocks. Thread: engine.

    A `hold` or `release` that raises must have changed nothing. `free_blocks` and `contents` are called in lazy mode
    only, `resident` also for models with windows or recurrent states.
    """

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep these blocks from being freed or reused until as many `release` calls name them."""

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """Undo one `hold` of each block.

        With `reuse_first`, those that were free when they were held, and that no request has used since, are allocated
        before all that were behind them in the free queue then, and after those that were ahead of them if the engine
        can tell. All others have been used later, and are allocated last.
        """

    def free_blocks(self) -> Iterator[int]:
        """Return free blocks in the order of their allocation."""

    def contents(self, block_ids: Sequence[int]) -> Sequence[Key | None]:
        """Return the key by which each block can be found, None where there is none.

        A block that was taken from the free queue since the last `take_allocated` has the key that is returned there.
        """

    def resident(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Return which of these keys the device holds in a block, free ones included.

        Also called on other threads, for operators: the answer may be outdated then, and `RuntimeError` or
        `StopIteration` may be raised because the engine changes its blocks meanwhile.
        """

    def take_allocated(self, among: Container[int]) -> Mapping[int, Key | None]:
        """Return the blocks of `among` that were taken from the free queue since the last call, and forget them all.

        Each comes with the hash and group that it could be found by before the first time, None where there was none.
        The engine's scheduler allocates blocks before `plan_step`, and nothing of that step has written to them yet. A
        block that will have been written to before stores ahead of the step comes with `OVERWRITTEN`.
        """


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One scheduled request in one engine step.

    `block_ids` are the request's whole tables, `num_computed_tokens` counts the tokens computed once this step has run.
    Tokens that may be taken back (drafts of speculative decoding) are not counted.
    """

    request_id: str
    block_ids: BlockTables
    num_computed_tokens: int
