"""Waiting queues: first come first served, or by (priority, arrival)."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from vllm_clone.core.request import Request


class WaitingQueue(Protocol):
    """Requests that wait for a run slot; ``put_back`` returns one to where it is served next."""

    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """Order of arrival; preempted requests go to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityQueue:
    """Smaller priority first, then earlier arrival, then request id. Removal leaves a dead entry to skip later."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, int, Request]] = []
        self._entry: dict[str, int] = {}
        self._ticket = itertools.count()

    def add(self, request: Request) -> None:
        ticket = next(self._ticket)
        self._entry[request.request_id] = ticket
        entry = (request.priority, request.arrival_time, request.request_id, ticket, request)
        heapq.heappush(self._heap, entry)

    put_back = add

    def peek(self) -> Request:
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entry[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._entry[request.request_id]
        if len(self._heap) > 2 * len(self._entry) + 16:  # dead entries must not pile up behind urgent requests
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap) if self._is_live(entry))

    def _is_live(self, entry: tuple[int, float, str, int, Request]) -> bool:
        return self._entry.get(entry[2]) == entry[3]


def make_queue(policy: str) -> WaitingQueue:
    return PriorityQueue() if policy == "priority" else FCFSQueue()
