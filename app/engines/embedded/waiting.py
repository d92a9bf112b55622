"""Queue of waiting requests: client addresses take turns, then tenants, then calls, then the prompts of a call.

So one address delays another by one request for each turn, however many cache salts, calls or prompts it sends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvferry.app.engines.embedded.request import Request

_Key = str | int | None


class _Rotation:
    """Members that take turns, the one whose turn is next first. They are rotations, or the requests of one call."""

    __slots__ = ("members",)

    def __init__(self) -> None:
        self.members: OrderedDict[_Key, _Rotation | Request] = OrderedDict()

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of their turns, each in constant time."""
        later: deque[Iterator[Request]] = deque()
        for member in self.members.values():
            if isinstance(member, _Rotation):
                turns = iter(member)
                yield next(turns)
                later.append(turns)
            else:
                yield member
        while later:
            turns = later.popleft()
            request = next(turns, None)
            if request is not None:
                yield request
                later.append(turns)

    def add(self, path: tuple[_Key, ...], request: Request) -> None:
        """Add a request as the last one of its call; rotations on its path that are new are the last ones of theirs."""
        key, *rest = path
        if not rest:
            self.members[key] = request
            return
        member = self.members.get(key)
        if not isinstance(member, _Rotation):
            member = self.members[key] = _Rotation()
        member.add(tuple(rest), request)

    def remove(self, path: tuple[_Key, ...], *, takes_turn: bool) -> None:
        """Remove a request, and rotations that it leaves empty. With its turn, the others on its path go to the end."""
        key, *rest = path
        member = self.members[key]
        if isinstance(member, _Rotation):
            member.remove(tuple(rest), takes_turn=takes_turn)
            if member.members:
                if takes_turn:
                    self.members.move_to_end(key)
                return
        del self.members[key]


class WaitingQueue:
    """Waiting requests by id and in the order in which they start. Not thread-safe.

    A preempted request is ahead of all others, the latest first. An address, tenant or call that begins to wait is the
    last one of its kind; after each start it is again. Adding, removing and starting take constant time.
    """

    def __init__(self) -> None:
        self._root = _Rotation()
        self._first: OrderedDict[str, Request] = OrderedDict()
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order in which they start."""
        yield from self._first.values()
        yield from self._root

    def has_other_address(self, address: str) -> bool:
        """Return whether a request of another client address waits for its turn. Takes constant time."""
        return len(self._root.members) > (address in self._root.members)

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id if it waits, else None."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request that is new, or whose slice is over."""
        self._requests[request.request_id] = request
        self._root.add(_path(request), request)

    def add_first(self, request: Request) -> None:
        """Queue a preempted request ahead of all others."""
        self._requests[request.request_id] = self._first[request.request_id] = request
        self._first.move_to_end(request.request_id, last=False)

    def start(self, request: Request) -> None:
        """Remove a request that starts. It need not be the first one."""
        self._remove(request, takes_turn=True)

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request.request_id in self._requests:
            self._remove(request, takes_turn=False)

    def _remove(self, request: Request, *, takes_turn: bool) -> None:
        del self._requests[request.request_id]
        if self._first.pop(request.request_id, None) is None:
            self._root.remove(_path(request), takes_turn=takes_turn)


def _path(request: Request) -> tuple[_Key, ...]:
    """Return address, tenant, call and id of a request: its keys in the rotations, from the root on."""
    return (*request.caller, request.call_number, request.request_id)
