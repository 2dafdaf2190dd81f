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
    """Smaller priority first, then earlier arrival. Removal marks entries and skips them later."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._entry: dict[str, int] = {}
        self._ticket = itertools.count()

    def add(self, request: Request) -> None:
        ticket = next(self._ticket)
        self._entry[request.request_id] = ticket
        heapq.heappush(self._heap, (request.priority, request.arrival_time, ticket, request))

    put_back = add

    def peek(self) -> Request:
        while self._entry.get(self._heap[0][3].request_id) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entry[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._entry[request.request_id]

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        return (r for _, _, ticket, r in sorted(self._heap) if self._entry.get(r.request_id) == ticket)


def make_queue(policy: str) -> WaitingQueue:
    return PriorityQueue() if policy == "priority" else FCFSQueue()
