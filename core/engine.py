"""What core asks of an engine: a view of its requests and a view of its device blocks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from kvferry.core.keys import Key

BlockTables = Sequence[Sequence[int]]
"""A request's device blocks by group: `tables[g][i]` holds its `i`-th block of group `g`, or the null block.

A device block belongs to one group at a time, and its number is not used in another group meanwhile.
"""


OVERWRITTEN: Key = b""
"""What a block holds that cannot be stored any more; no block is found by it."""


class EngineRequest(Protocol):
    """A request as its engine holds it; core keeps the reference from announcement to finish and only reads it.

    `aliases` are the other ids that a client may know it by, most exact first. `tenant` is already a digest.
    `block_hashes` is a live list with one chained hash for each full `hash_block_size` tokens, and grows with decode.
    An engine that knows priorities has an integer `priority` besides, which policy rules may ask for.
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
    """The engine's device blocks, as far as offloading needs them. Called on the engine's thread only.

    A `hold` or `release` that raises must have changed nothing. `free_blocks` and `contents` are called in lazy mode
    only, `resident` also for models with windows or recurrent states.
    """

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep these blocks from being freed or reused until as many `release` calls name them."""

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """Undo one `hold` of each of these blocks. With `reuse_first` those that are free now are given out next."""

    def free_blocks(self, after: int | None) -> Iterator[int] | None:
        """Free blocks in the order in which they will be given out, behind block `after` or from the head for None.

        None when `after` is not free any more.
        """

    def contents(self, block_ids: Sequence[int]) -> Sequence[Key | None]:
        """The hash and group that each of these blocks can be found by, None where there is none."""

    def resident(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Which of these keys the device holds in some block, free ones among them."""

    def take_given_out(self, among: Container[int]) -> Mapping[int, Key | None]:
        """Return the blocks of `among` that were given out of the free queue since the last call, and forget them all.

        Each comes with the hash and group that it could be found by before the first time, None where there was none.
        The engine's scheduler gives blocks out before `plan_step`, and nothing of that step has written to them yet. A
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
