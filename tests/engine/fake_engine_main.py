"""What the engine process of the tests runs: the real one, with the fake executor."""

from tests.engine.fakes import FakeExecutor
from vllm_clone.core.engine_core_proc import run_and_exit

if __name__ == "__main__":
    run_and_exit(FakeExecutor)
