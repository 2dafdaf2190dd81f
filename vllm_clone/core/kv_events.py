"""Publishes what the KV cache holds over ZeroMQ, in vLLM's wire format.

A message has three frames: the topic, a number that counts batches (8 bytes, big-endian), and a batch in msgpack.
Whoever missed some sends the first number wanted to the replay socket and gets the batches from there on, then −1.
"""

import collections
import queue
import threading
import time
from collections.abc import Sequence

import msgspec
import zmq

from vllm_clone.config.kv_events import KVEventsOptions
from vllm_clone.core.kv_cache.events import KVCacheEvent
from vllm_clone.errors import ConfigError
from vllm_clone.logger import init_logger, log_once

logger = init_logger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
CLOSE_SECONDS = 1.0


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step."""

    ts: float
    """Wall clock, seconds."""
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Sends batches from a thread of its own; the engine never waits for it.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, options: KVEventsOptions) -> None:
        self._topic = options.topic.encode()
        self._outbox: queue.Queue[tuple[int, KVEventBatch] | None] = queue.Queue(options.max_queue_size)
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=options.buffer_steps)
        self._lock = threading.Lock()
        self._next = 0
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, options.endpoint, options.hwm)
            self._replay = None
            if options.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, options.replay_endpoint, 0)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._sender = threading.Thread(target=self._send_all, name="kv-events", daemon=True)
        self._sender.start()
        if self._replay is not None:
            threading.Thread(target=self._answer_all, args=(self._replay,), name="kv-replay", daemon=True).start()

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Queue a step's events; without any, nothing is sent."""
        if not events:
            return
        item = (self._next, KVEventBatch(time.time(), list(events), 0))
        self._next += 1
        try:
            self._outbox.put_nowait(item)
        except queue.Full:
            log_once(logger, 30, "KV cache events come faster than they can be sent; some are lost.")

    def close(self) -> None:
        """Send what is queued, within :data:`CLOSE_SECONDS`."""
        try:
            self._outbox.put(None, timeout=CLOSE_SECONDS)
            self._sender.join(CLOSE_SECONDS)
        except queue.Full:
            pass
        # Ends what the threads wait for; each closes its own socket, since a socket belongs to one thread.
        self._context.term()

    def _socket(self, kind: int, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.set_hwm(hwm)
        made.linger = int(CLOSE_SECONDS * 1000)
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                made.bind(endpoint)
            else:
                made.connect(endpoint)
        except zmq.ZMQError as error:
            made.close(0)
            raise ConfigError(f"--kv-events-config: the endpoint {endpoint} cannot be used ({error}).") from error
        return made

    def _send_all(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while (item := self._outbox.get()) is not None:
                number, batch = item
                payload = encoder.encode(batch)
                with self._lock:
                    self._kept.append((number, payload))
                self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        except zmq.ContextTerminated:
            pass
        finally:
            self._pub.close()

    def _answer_all(self, replay: "zmq.Socket[bytes]") -> None:
        try:
            while True:
                client, *_, wanted = replay.recv_multipart()
                first = int.from_bytes(wanted, "big")
                with self._lock:
                    batches = [(number, payload) for number, payload in self._kept if number >= first]
                for number, payload in batches:
                    replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
                replay.send_multipart((client, b"", b"", END, b""))
        except zmq.ContextTerminated:
            pass
        finally:
            replay.close(0)
