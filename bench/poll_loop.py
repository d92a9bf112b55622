"""A loop that asks over HTTP at a steady pace, compiled, so that asking takes next to nothing of the machine.

The interpreter takes a few tenths of a millisecond to wake up, ask and go to sleep again, on a machine that has other
things to do as much as what it asks for, and that is not what is to be measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

TARGET, COUNT, STOP = range(3)
"""Words that are shared with the loop: whom to ask (negative: nobody), answers so far, whether to end."""

ENDED, REFUSED, TOO_LARGE = range(3)
"""Why the loop returned: it was told to, or the connection of the one it asked ended; an answer was not 200; or it did
not fit the buffer."""

_SECOND_NS = 1_000_000_000
_CLOCK_MONOTONIC = 1
_NO_SIGNAL = 0x4000
_LENGTH = np.frombuffer(b"content-length:", np.uint8)


@functools.cache
def poll_loop() -> Callable[..., tuple[int, int]]:
    """A function that asks whoever `words[TARGET]` says, until it cannot, and returns why and how long the answer was.

    Its arguments are `words` (int64); the file descriptors of connected, blocking sockets (int32) and the bytes to send
    over each (rows of uint8, padded) with their numbers (int64); the time from one call to the next in nanoseconds; and
    a buffer for answers (uint8).
    """
    from numba import njit

    libc = ctypes.CDLL(None)
    send, recv = libc.send, libc.recv
    for function in (send, recv):
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        function.restype = ctypes.c_ssize_t
    clock_gettime, nanosleep = libc.clock_gettime, libc.nanosleep
    clock_gettime.argtypes = [ctypes.c_int, ctypes.c_void_p]
    nanosleep.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    clock_gettime.restype = nanosleep.restype = ctypes.c_int

    @njit  # type: ignore[untyped-decorator]
    def now_ns(timespec: NDArray[np.int64]) -> int:
        clock_gettime(_CLOCK_MONOTONIC, timespec.ctypes)
        return timespec[0] * _SECOND_NS + timespec[1]

    @njit  # type: ignore[untyped-decorator]
    def size_of(answer: NDArray[np.uint8]) -> int:
        """How long a whole answer is that begins like this; 0 if its head is not complete."""
        length, start = 0, 0
        for end in range(1, len(answer)):
            if answer[end - 1] != 13 or answer[end] != 10:
                continue
            if end - start == 1:
                return end + 1 + length
            # Names of headers may be in capitals: 32 is what letters differ by.
            is_length = end - start > len(_LENGTH)
            for index in range(len(_LENGTH)):
                is_length = is_length and (answer[start + index] | 32) == (_LENGTH[index] | 32)
            if is_length:
                length = 0
                for digit in answer[start + len(_LENGTH) : end - 1]:
                    if 48 <= digit <= 57:
                        length = 10 * length + digit - 48
            start = end + 1
        return 0

    @njit  # type: ignore[untyped-decorator]
    def loop(
        words: NDArray[np.int64],
        sockets: NDArray[np.int32],
        requests: NDArray[np.uint8],
        lengths: NDArray[np.int64],
        period_ns: int,
        answer: NDArray[np.uint8],
    ) -> tuple[int, int]:
        timespec = np.zeros(2, np.int64)
        due_ns = now_ns(timespec)
        while words[STOP] == 0:
            # Who is late by more than a second does not make up for it.
            due_ns = max(due_ns + period_ns, now_ns(timespec) - _SECOND_NS)
            wait_ns = due_ns - now_ns(timespec)
            if wait_ns > 0:
                timespec[0], timespec[1] = wait_ns // _SECOND_NS, wait_ns % _SECOND_NS
                nanosleep(timespec.ctypes, 0)
            whom = words[TARGET]
            if whom < 0:
                continue
            send(sockets[whom], requests[whom].ctypes, lengths[whom], _NO_SIGNAL)
            have, whole = 0, 0
            while whole == 0 or have < whole:
                got = recv(sockets[whom], answer[have:].ctypes, len(answer) - have, 0)
                if got <= 0:
                    return ENDED, have
                have += got
                if whole == 0:
                    whole = size_of(answer[:have])
                    if whole > len(answer):
                        return TOO_LARGE, have
            # After "HTTP/1.1 ".
            if answer[9] != 50 or answer[10] != 48 or answer[11] != 48:
                return REFUSED, have
            words[COUNT] += 1
        return ENDED, 0

    return loop
