"""One of several API servers, started by the supervisor: ``python -m`` with this module's name.

Its standard input carries one line of JSON, a :class:`Boot`, and then stays open as a lifeline.
"""

import os
import signal
import socket
import sys

import msgspec

from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.engine.shared_engine import AttachedEngine, Board
from vllm_clone.errors import ConfigError, EngineDeadError
from vllm_clone.logger import set_process_name
from vllm_clone.utils.process import die_with_parent, watch_lifeline


class Boot(msgspec.Struct):
    """What the supervisor tells an API server first; descriptors are inherited."""

    config: VllmConfig
    frontend: FrontendConfig
    index: int
    count: int
    """How many API servers there are."""
    engine_pid: int
    parent_pid: int
    listener: int
    door: tuple[int, int]
    board: int


def main() -> int:
    """Serve until the supervisor's signal or the engine's death; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # the supervisor died while it wrote
    boot = msgspec.json.decode(line, type=Boot)
    set_process_name(f"ApiServer_{boot.index}")
    die_with_parent(boot.parent_pid)
    watch_lifeline(sys.stdin.fileno(), lambda: os._exit(1))
    from vllm_clone.entrypoints.launchers.api_server import run_shared

    engine = AttachedEngine(boot.engine_pid, boot.door, boot.index)
    try:
        board = Board(boot.board, boot.count, boot.index)
        return run_shared(boot.config, boot.frontend, socket.socket(fileno=boot.listener), engine, board)
    except (ConfigError, EngineDeadError, OSError) as error:
        if boot.index == 0:  # the others would say the same
            print(f"vllm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
