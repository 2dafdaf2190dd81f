"""Order of service."""

import pytest

from tests.core.harness import make_request
from vllm_clone.core.request import Request
from vllm_clone.core.sched.queue import FCFSQueue, PriorityQueue, WaitingQueue, make_queue


def named(request_id: str, priority: int = 0, arrival: float = 0.0) -> Request:
    return make_request(3, request_id, priority=priority, arrival=arrival)


def drain(queue: WaitingQueue) -> list[str]:
    order = []
    while len(queue):
        assert queue.peek() is next(iter(queue))
        order.append(queue.pop().request_id)
    return order


def test_policies_have_their_queues() -> None:
    assert isinstance(make_queue("fcfs"), FCFSQueue)
    assert isinstance(make_queue("priority"), PriorityQueue)


def test_first_come_first_served() -> None:
    queue = FCFSQueue()
    for name in "abc":
        queue.add(named(name))
    assert drain(queue) == ["a", "b", "c"]


def test_a_request_put_back_is_served_next() -> None:
    queue = FCFSQueue()
    queue.add(named("a"))
    queue.put_back(named("z"))
    assert drain(queue) == ["z", "a"]


def test_priority_order_is_priority_then_arrival_then_id() -> None:
    queue = PriorityQueue()
    for request in [named("d", 1, 1.0), named("c", 0, 2.0), named("b", 0, 1.0), named("a", 0, 1.0)]:
        queue.add(request)
    assert drain(queue) == ["a", "b", "c", "d"]


def test_a_preempted_request_keeps_its_place_among_priorities() -> None:
    queue = PriorityQueue()
    queue.add(named("urgent", -1))
    queue.put_back(named("preempted", 1))
    assert drain(queue) == ["urgent", "preempted"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removal_from_the_middle(policy: str) -> None:
    queue = make_queue(policy)
    requests = [named(name, arrival=i) for i, name in enumerate("abcd")]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    queue.remove(requests[2])
    assert len(queue) == 2
    assert [r.request_id for r in queue] == ["b", "d"]
    queue.add(requests[0])
    assert len(queue) == 3
    assert set(drain(queue)) == {"a", "b", "d"}


def test_removed_requests_do_not_pile_up_behind_urgent_ones() -> None:
    queue = PriorityQueue()
    queue.add(named("urgent", -1))
    for i in range(1000):
        request = named(f"r{i}", 5)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 50
    assert drain(queue) == ["urgent"]
