"""`vllm bench latency` and `vllm bench startup`: an engine measured without a server."""
