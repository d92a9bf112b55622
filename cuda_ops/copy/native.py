"""Compiled functions of pool files."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.native import compiled

Words = NDArray[np.int64]


@functools.cache
def word_copies() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return functions over mapped int64 words that run without the interpreter lock; compiled once per machine.

    A page fault on a file mapping can take milliseconds when the disk is busy; NumPy would hold the lock meanwhile.

    Returns:
        scatter: (words, places, values): `words[places[i]] = values[i]`.
        gather_rows: (rows, places, found): `found[i, :] = rows[places[i], :]`.
        scatter_columns: (rows, places, columns, values): `rows[places[i], c] = values[i, c]`, `columns` in order.
    """
    from numba import types

    words, rows = types.int64[::1], types.int64[:, ::1]
    given, given_rows = types.Array(types.int64, 1, "C", readonly=True), types.Array(types.int64, 2, "C", readonly=True)

    @compiled(types.void(words, given, given), nogil=True)
    def scatter(words: Words, places: Words, values: Words) -> None:
        for i in range(len(places)):
            words[places[i]] = values[i]

    @compiled(types.void(given_rows, given, rows), nogil=True)
    def gather_rows(rows: Words, places: Words, found: Words) -> None:
        for i in range(len(places)):
            for column in range(rows.shape[1]):
                found[i, column] = rows[places[i], column]

    @compiled(types.void(rows, given, given, given_rows), nogil=True)
    def scatter_columns(rows: Words, places: Words, columns: Words, values: Words) -> None:
        for i in range(len(places)):
            for column in columns:
                rows[places[i], column] = values[i, column]

    return scatter, gather_rows, scatter_columns
