"""`vllm run-batch`: files of requests in OpenAI's batch format, answered without an HTTP server."""
