"""What the engine process of the tests runs: the real one, with the fake executor."""

import sys

from tests.engine.fakes import FakeExecutor
from vllm_clone.core.engine_core_proc import main

if __name__ == "__main__":
    sys.exit(main(FakeExecutor))
