"""The HTTP server's configuration; the engine never sees it."""

from dataclasses import dataclass
from typing import Literal

from vllm_clone.config.flags import flag

UvicornLogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass
class FrontendConfig:
    """The HTTP server."""

    host: str | None = flag(None, "Address to listen on; all interfaces when not given.", nullable=True)
    port: int = flag(8000, "Port to listen on.")
    uds: str | None = flag(None, "Unix socket to listen on instead of host and port.", nullable=True)
    api_key: list[str] | None = flag(None, "Keys of which clients must send one.", secret=True)
    allowed_origins: list[str] = flag([], "Origins that browsers may call from.")
    allowed_methods: list[str] = flag(["*"], "Methods that browsers may use.")
    allowed_headers: list[str] = flag(["*"], "Headers that browsers may send.")
    allow_credentials: bool = flag(False, "Let browsers send credentials.")
    root_path: str | None = flag(None, "Path prefix a proxy strips before it calls this server.", nullable=True)
    chat_template: str | None = flag(None, "Chat template: a file, or the template itself on one line.", nullable=True)
    chat_template_content_format: Literal["auto", "string", "openai"] = flag(
        "auto", "Whether templates get message content as one string or as a list of parts."
    )
    trust_request_chat_template: bool = flag(False, "Let requests bring their own chat template.")
    response_role: str = flag("assistant", "Role name of generated chat messages.")
    return_tokens_as_token_ids: bool = flag(False, "Write tokens in logprobs as token_id:N.")
    enable_prompt_tokens_details: bool = flag(False, "Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = flag(False, "Send usage in every stream, asked for or not.")
    enable_server_load_tracking: bool = flag(False, "Count requests in flight for /load.")
    enable_request_id_headers: bool = flag(False, "Add X-Request-Id to every response.")
    enable_tokenizer_info_endpoint: bool = flag(False, "Serve /tokenizer_info.")
    max_log_len: int | None = flag(None, "Most characters or token ids of a prompt to log.", nullable=True)
    uvicorn_log_level: UvicornLogLevel = flag("info", "Log level of the HTTP server.")
    disable_uvicorn_access_log: bool = flag(False, "No access log lines.")
    disable_fastapi_docs: bool = flag(False, "Serve neither /docs nor /openapi.json.")
    sse_keep_alive_interval: int = flag(0, "Seconds of silence after which a stream gets a comment line; 0 = never.")
    shutdown_timeout: int = flag(0, "Seconds that open requests may take to finish at shutdown; 0 aborts them.")
    disable_frontend_multiprocessing: bool = flag(False, "Run the engine in the server's process; for debugging.")
