"""What keeps a folder from serving, told from the error that a call to it ended with."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from enum import Enum


class Trouble(Enum):
    """What does not go any more: writing only, or reading too."""

    FULL = "full"
    UNWRITABLE = "unwritable"
    GONE = "gone"
    BROKEN = "broken"

    @property
    def is_readable(self) -> bool:
        """Whether files that are there can be read."""
        return self in (Trouble.FULL, Trouble.UNWRITABLE)


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OF_WHOLE = frozenset(
    (*_NO_SPACE, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)
_KINDS = dict.fromkeys((*_NO_SPACE, errno.EFBIG), Trouble.FULL)
_KINDS |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), Trouble.UNWRITABLE)
_KINDS |= dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV), Trouble.GONE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A trouble, and the system's words for it."""

    trouble: Trouble
    text: str


def is_no_space(error: OSError) -> bool:
    """Whether deleting files may help."""
    return error.errno in _NO_SPACE


def is_of_whole(error: OSError) -> bool:
    """Whether an error concerns the whole folder, whichever entry it occurred at. Others may be of that entry only."""
    return error.errno in _OF_WHOLE


def diagnose(error: OSError) -> Diagnosis:
    """Name the trouble behind an error."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return Diagnosis(_KINDS.get(error.errno or 0, Trouble.BROKEN), text)
