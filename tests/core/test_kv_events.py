"""--kv-events-config: a router that follows the events knows what the prefix cache holds."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.core.test_engine_core import request
from tests.engine.fakes import FakeExecutor, fake_config
from vllm_clone.config.kv_events import KVEventsOptions, kv_events_options
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.core.kv_cache.events import AllBlocksCleared, BlockRemoved
from vllm_clone.core.kv_events import KVEventPublisher
from vllm_clone.errors import ConfigError
from vllm_clone.messages import EngineCoreRequest

Index = set[tuple[bytes, int]]


class Router:
    """Subscribes, and keeps an index of what it hears."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe("kv")
        self.socket.rcvtimeo = 10_000
        self.socket.connect(endpoint)
        self.known: Index = set()
        self.events: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    def hear(self) -> None:
        """One batch."""
        topic, number, payload = self.socket.recv_multipart()
        assert topic == b"kv-topic"
        self.numbers.append(int.from_bytes(number, "big"))
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert stamp > 0
        assert rank == 0
        self.events += events
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
                continue
            keys = {(block_hash, event["group_idx"]) for block_hash in event["block_hashes"]}
            assert keys.isdisjoint(self.known) is (event["type"] == "BlockStored")
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                self.known |= keys
            else:
                self.known -= keys

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/pub", "topic": "kv-topic",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }  # fmt: skip


@pytest.fixture
def core(options: dict[str, Any]) -> Iterator[EngineCore]:
    config = dataclasses.replace(fake_config(num_blocks=8, max_model_len=100), kv_events_config=options)
    made = EngineCore(config, FakeExecutor)
    yield made
    made.shutdown()


@pytest.fixture
def router(options: dict[str, Any]) -> Iterator[Router]:
    made = Router(options["endpoint"])
    yield made
    made.close()


def serve(core: EngineCore, *requests: EngineCoreRequest) -> None:
    for one in requests:
        core.add_request(one)
    while core.has_work:
        core.step()


def held(core: EngineCore) -> Index:
    return set(core.scheduler.kv.pool._cached)


def await_subscriber(core: EngineCore, router: Router) -> None:
    """A subscription takes a moment to arrive; batches before it are lost, as for any subscriber."""
    router.socket.rcvtimeo = 50
    publisher = core._publisher
    assert publisher is not None
    for _ in range(200):
        publisher.publish([AllBlocksCleared()])
        try:
            router.hear()
        except zmq.Again:
            continue
        break
    router.socket.rcvtimeo = 10_000
    while router.numbers[-1] < publisher._next - 1:
        router.hear()


def test_a_router_that_follows_knows_what_the_cache_holds(core: EngineCore, router: Router) -> None:
    await_subscriber(core, router)
    router.events.clear()
    for prompt in ([97] * 40, [97] * 40, [98] * 60, [99] * 60):
        serve(core, request(f"r{len(router.events)}-{prompt[0]}", prompt=prompt))
    while router.known != held(core):
        router.hear()
    first = router.events[0]
    assert (first["type"], first["parent_block_hash"], first["token_ids"]) == ("BlockStored", None, [97] * 32)
    assert (first["medium"], first["kv_cache_spec_kind"]) == ("GPU", "full_attention")
    assert any(event["type"] == "BlockRemoved" for event in router.events)
    assert core.reset_prefix_cache()
    while router.known:
        router.hear()
    assert router.numbers == list(range(router.numbers[0], router.numbers[0] + len(router.numbers)))


def test_missed_batches_are_repeated(core: EngineCore, options: dict[str, Any]) -> None:
    serve(core, request("a", prompt=[97] * 40))
    serve(core, request("b", prompt=[98] * 40))
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo = 10_000
    dealer.connect(options["replay_endpoint"])
    try:
        numbers: list[int] = []
        while numbers[:2] != [0, 1]:  # the publishing thread may still be at it
            dealer.send_multipart((b"", (0).to_bytes(8, "big")))
            numbers = []
            while True:
                _, _, number, payload = dealer.recv_multipart()
                if not payload:
                    assert int.from_bytes(number, "big", signed=True) == -1
                    break
                numbers.append(int.from_bytes(number, "big"))
        dealer.send_multipart((b"", (1).to_bytes(8, "big")))
        assert int.from_bytes(dealer.recv_multipart()[2], "big") == 1
    finally:
        dealer.close(0)
        context.term()


def test_a_salted_block_carries_its_salt(core: EngineCore) -> None:
    salted = msgspec.structs.replace(request("s", prompt=[97] * 40), cache_salt="salt")
    core._publisher, publisher = None, core._publisher
    serve(core, salted)
    core._publisher = publisher
    assert core.scheduler.kv_events is not None
    (stored,) = core.scheduler.kv_events.take()
    assert stored.extra_keys == [("salt",), None]  # type: ignore[attr-defined]


def test_an_endpoint_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"endpoint ipc://.*/no/dir/x cannot be used"):
        KVEventPublisher(KVEventsOptions(True, endpoint=f"ipc://{tmp_path}/no/dir/x"))


def test_a_full_queue_loses_batches_and_never_blocks(tmp_path: Path) -> None:
    publisher = KVEventPublisher(KVEventsOptions(True, endpoint=f"ipc://{tmp_path}/pub", max_queue_size=1))
    for i in range(1000):
        publisher.publish([BlockRemoved([b"%d" % i], "GPU", 0)])
    publisher.close()
    assert publisher._next == 1000


@pytest.mark.parametrize("turn", range(20))
def test_closing_ends_the_thread_that_waits_for_replays(tmp_path: Path, turn: int) -> None:
    endpoint, replay = f"ipc://{tmp_path}/pub{turn}", f"ipc://{tmp_path}/replay{turn}"
    publisher = KVEventPublisher(KVEventsOptions(True, endpoint=endpoint, replay_endpoint=replay))
    publisher.publish([AllBlocksCleared()])
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert publisher._pub.closed
    assert publisher._replay is not None
    assert publisher._replay.closed


@pytest.mark.parametrize(
    "value", [None, {}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}]
)
def test_events_are_off_unless_asked_for(value: dict[str, Any] | None) -> None:
    assert kv_events_options(value) is None


@pytest.mark.parametrize("value", [{"buffer_steps": 0}, {"hwm": "x"}, {"publisher": "kafka"}])
def test_wrong_options_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-config: .*the keys are"):
        kv_events_options(value)
