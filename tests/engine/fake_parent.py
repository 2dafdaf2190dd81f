"""A parent that starts an engine, says its pid, and waits to be killed."""

import os
import signal
import sys

from tests.engine.fakes import fake_config
from vllm_clone.engine.engine_process import EngineProcess

if __name__ == "__main__":
    process = EngineProcess.start(fake_config(fake={"fifo": sys.argv[1]} | ({"fail": "slow"} if sys.argv[1] else {})),
                                  "tests.engine.fake_engine_main")  # fmt: skip
    if not sys.argv[1]:
        process.wait_ready()
    os.write(1, f"{process.pid}\n".encode())
    signal.pause()
