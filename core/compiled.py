"""Functions over arrays of numbers, compiled for this machine: once, where the machine code can be kept.

It is kept beside the source, or else in the user's cache; the variable NUMBA_CACHE_DIR names another place. Where none
can be written, or what is there cannot be read, a function is compiled anew, which takes some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: Any, *, nogil: bool = False) -> Callable[[F], F]:
    """A decorator that compiles a function for one Numba signature, at once.

    With `nogil` it runs without the interpreter's lock.

    The function may use numbers of its own file, by a change of which what is kept becomes void. No other compiled
    function: that is another object in each process, so that what is kept would never be found again.
    """
    # Not above: it takes a third of a second, and the command line imports core, too.
    from numba import njit

    def compile_it(function: F) -> F:
        try:
            return cast("F", njit([signature], cache=True, nogil=nogil)(function))
        except Exception:  # noqa: BLE001 - whatever a cache has to say: what is wrong with the function is said below
            return cast("F", njit([signature], nogil=nogil)(function))

    return compile_it
