"""`vllm run-batch`."""
