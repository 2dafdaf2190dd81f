"""`vllm run-batch`: requests from a file, answers into a file."""
