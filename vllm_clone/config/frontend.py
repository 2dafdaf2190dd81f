"""The server's own configuration; the engine never sees it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vllm_clone.config.flags import (
    flag,
    lora_module,
)
from vllm_clone.config.support import gpu_only, later

UvicornLogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass
class ServeConfig:
    """What `vllm serve` starts."""

    headless: bool = flag(
        False,
        (
            "Start only engine-core processes on this machine and opens no HTTP listener; the process registers "
            "with the head node's DP handshake address (or, when it belongs to a TP/PP group spanning nodes, "
            "joins as executor workers only)."
        ),
        one_way=True,
        support=later("Data-parallel engines"),
    )
    api_server_count: int | None = flag(
        None,
        "Number of HTTP front-end processes that share one listening port and one set of engine cores.",
        aliases=("-asc",),
    )
    config: str | None = flag(None, "YAML file with flags; typed flags win over it.")
    grpc: bool = flag(
        False,
        "Serve the engine through a Python gRPC service on --port instead of the OpenAI-style HTTP application.",
        one_way=True,
        support=later("gRPC services"),
    )
    disable_log_requests: bool = flag(
        True, "The opposite of --enable-log-requests, which wins; logs requests when negated."
    )
    dry_run: bool = flag(
        False, "Print the resolved configuration and where each value comes from, then stop.", one_way=True
    )


@dataclass
class FrontendConfig:
    """The HTTP server."""

    lora_modules: Annotated[list[dict[str, str]], lora_module] | None = flag(
        None,
        (
            "Adapters to load at start-up and publish as extra model ids. Each item is either NAME=PATH or a JSON "
            "object with name, path and optionally base_model_name (0.32.0 also knows is_3d_lora_weight); items "
            "containing '=' and no comma use the short form."
        ),
        nullable=True,
        support=later("LoRA adapters"),
    )
    chat_template: str | None = flag(None, "Chat template: a file, or the template itself on one line.", nullable=True)
    chat_template_content_format: Literal["auto", "openai", "string"] = flag(
        "auto", "Whether templates get message content as one string or as a list of parts."
    )
    trust_request_chat_template: bool = flag(False, "Let requests bring their own chat template.")
    default_chat_template_kwargs: dict[str, Any] | None = flag(
        None, "JSON object merged under every request's chat_template_kwargs; request keys win on collision."
    )
    response_role: str = flag("assistant", "Role name of generated chat messages.")
    return_tokens_as_token_ids: bool = flag(False, "Write tokens in logprobs as token_id:N.")
    enable_auto_tool_choice: bool = flag(
        False,
        (
            "Allow tool_choice='auto' (and the default when tools are present) by running the configured tool "
            "parser on the output."
        ),
        support=later("Tool calls"),
    )
    exclude_tools_when_tool_choice_none: bool = flag(
        False,
        (
            "Drop tool definitions from the prompt when the request says tool_choice='none'; otherwise they stay "
            "in the prompt but no call is parsed."
        ),
    )
    tool_call_parser: str | None = flag(
        None,
        "Name of the parser that turns model text into tool calls.",
        nullable=True,
        support=later("Tool calls"),
        known=(
            "apertus",
            "cohere_command3",
            "cohere_command4",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "deepseek_v41",
            "dots",
            "ernie45",
            "functiongemma",
            "gemma4",
            "gigachat3",
            "glm45",
            "glm47",
            "granite",
            "granite-20b-fc",
            "granite4",
            "hermes",
            "hf",
            "hunyuan_a13b",
            "hy_v3",
            "hy_v4",
            "inkling",
            "internlm",
            "jamba",
            "k2_horizon",
            "kimi_k2",
            "kimi_k3",
            "lfm2",
            "ling3",
            "llama3_json",
            "llama4_json",
            "llama4_pythonic",
            "longcat",
            "mimo",
            "minicpm5",
            "minimax_m2",
            "minimax_m3",
            "mistral",
            "muse_glimmer",
            "olmo3",
            "openai",
            "phi4_mini_json",
            "plamo3",
            "poolside_v1",
            "pythonic",
            "qwen3_coder",
            "qwen3_json",
            "qwen3_xml",
            "seed_oss",
            "step3",
            "step3p5",
            "xlam",
        ),
    )
    tool_parser_plugin: str = flag(
        "",
        "Python file imported at start-up so that it can register additional tool parsers.",
        support=later("Tool calls"),
    )
    tool_strict_level: Literal["auto", "function", "parameter"] = flag(
        "auto",
        (
            "Server-wide minimum for grammar-constrained tool calls: 'auto' follows tool_choice and each tool's "
            "strict field, 'function' always constrains the call wrapper and function name, 'parameter' also "
            "enforces argument schemas as if strict were true."
        ),
        support=later("Tool calls"),
    )
    tool_server: str | None = flag(
        None,
        (
            "Comma-separated host:port list of MCP-style tool servers used by the Responses API for built-in "
            "tools, or the word 'demo' for the bundled browser and Python tools."
        ),
        nullable=True,
        support=later("Tool calls"),
    )
    log_config_file: str | None = flag(
        None, "JSON file in Python dictConfig form applied to both the server's and uvicorn's loggers."
    )
    max_log_len: int | None = flag(None, "Most characters or token ids of a prompt to log.", nullable=True)
    enable_prompt_tokens_details: bool = flag(False, "Report cached prompt tokens in usage.")
    enable_per_request_metrics: bool = flag(
        False, "Add a metrics object with this request's queue, prefill, decode and total timings to API responses."
    )
    enable_server_load_tracking: bool = flag(False, "Count requests in flight for /load.")
    enable_force_include_usage: bool = flag(False, "Send usage in every stream, asked for or not.")
    sse_keep_alive_interval: int = flag(0, "Seconds of silence after which a stream gets a comment line; 0 = never.")
    enable_tokenizer_info_endpoint: bool = flag(False, "Serve /tokenizer_info.")
    enable_log_outputs: bool = flag(False, "Log generated text and finish reason at INFO, and output ids at DEBUG.")
    enable_log_deltas: bool = flag(True, "Whether streamed increments are logged as well as the final text.")
    cohere_is_reasoning_model: bool = flag(
        True,
        (
            "For the Cohere chat endpoint only: true returns chain of thought as thinking content blocks, false "
            "returns it in tool_plan next to tool calls."
        ),
        support=later("Cohere endpoints"),
    )
    cohere_format: Literal["cmd4", "cmd3"] = flag(
        "cmd4", "Prompt dialect used by --tokenizer-mode cohere.", support=later("Cohere endpoints")
    )
    log_error_stack: bool = flag(False, "Log the traceback behind each error answer.")
    tokens_only: bool = flag(
        False,
        "Expose only the token-in/token-out generation endpoint, for deployments whose rendering happens elsewhere.",
        support=later("Scale-out endpoints"),
    )
    enable_scale_out: bool = flag(
        False,
        (
            "Add the disaggregated front-end endpoints: /inference/v1/generate, /render, /derender, plus "
            "/inference/v1/abort_requests in 0.32.0."
        ),
        support=later("Scale-out endpoints"),
    )
    fingerprint_mode: Literal["custom", "full", "hash", "none"] = flag(
        "full",
        (
            "Shape of system_fingerprint: full = vllm-<version>[-tpN][-ppN][-dpN][-ep]-<hash8>, hash = without "
            "the parallel part, custom = literal text, none = null."
        ),
    )
    fingerprint_value: str | None = flag(None, "Literal fingerprint text.", nullable=True)
    host: str | None = flag(None, "Address to listen on; all interfaces when not given.", nullable=True)
    port: int = flag(8000, "Port to listen on.")
    data_parallel_supervisor_port: int = flag(
        9256,
        "Port where the multi-port supervisor answers /health, /ready and /readyz for the whole node.",
        support=later("Data-parallel engines"),
    )
    dp_supervisor_probe_interval_s: float = flag(
        5.0, "Seconds between supervisor health probes of each child.", support=later("Data-parallel engines")
    )
    dp_supervisor_probe_timeout_s: float = flag(
        5.0,
        (
            "Time budget in seconds of one child health probe (documents describe it as the wait between retries "
            "after a connection error)."
        ),
        support=later("Data-parallel engines"),
    )
    dp_supervisor_probe_failure_threshold: int = flag(
        3, "How many connection errors in a row make a child count as failed.", support=later("Data-parallel engines")
    )
    uds: str | None = flag(None, "Unix socket to listen on instead of host and port.", nullable=True)
    uvicorn_log_level: UvicornLogLevel = flag("info", "Log level of the HTTP server.")
    disable_uvicorn_access_log: bool = flag(False, "No access log lines.")
    disable_access_log_for_endpoints: str | None = flag(
        None, "Comma-separated paths whose access lines are suppressed while others stay.", nullable=True
    )
    allow_credentials: bool = flag(False, "Let browsers send credentials.")
    allowed_origins: list[str] = flag(["*"], "Origins that browsers may call from.")
    allowed_methods: list[str] = flag(["*"], "Methods that browsers may use.")
    allowed_headers: list[str] = flag(["*"], "Headers that browsers may send.")
    api_key: list[str] | None = flag(None, "Keys of which clients must send one.", secret=True)
    ssl_keyfile: str | None = flag(None, "TLS private key in PEM form.", nullable=True)
    ssl_certfile: str | None = flag(None, "TLS certificate chain in PEM form.", nullable=True)
    ssl_ca_certs: str | None = flag(None, "CA bundle for verifying client certificates.", nullable=True)
    enable_ssl_refresh: bool = flag(
        False, "Use the key, certificate and CA files anew when they change, without a restart."
    )
    ssl_cert_reqs: Literal[0, 1, 2] = flag(
        0, "Client-certificate policy with the numbers of Python's ssl module: 0 none, 1 optional, 2 required."
    )
    ssl_ciphers: str | None = flag(
        None, "OpenSSL cipher string for TLS 1.2 and older; TLS 1.3 suites are not affected.", nullable=True
    )
    root_path: str | None = flag(None, "Path prefix a proxy strips before it calls this server.", nullable=True)
    middleware: list[str] = flag(
        [],
        (
            "Import path of extra ASGI middleware; repeat the flag for several. A class is added as middleware, "
            "an async function as an HTTP hook."
        ),
        repeatable=True,
    )
    enable_request_id_headers: bool = flag(False, "Add X-Request-Id to every response.")
    disable_fastapi_docs: bool = flag(False, "Serve neither /docs nor /openapi.json.")
    h11_max_incomplete_event_size: int = flag(4194304, "Most bytes of an unfinished request head.")
    h11_max_header_count: int = flag(256, "Most header fields accepted in one request.")
    enable_offline_docs: bool = flag(
        False,
        "Serve /docs from this package, for machines without internet access.",
    )
    enable_flash_late_interaction: bool = flag(
        True,
        "Score late-interaction models with the fused device kernel, inside the API process.",
        support=gpu_only("The fused MaxSim kernels"),
    )
    shutdown_timeout: int = flag(
        0, "Seconds that open requests may take to finish at shutdown; 0 aborts them.", heading="VllmConfig"
    )
    disable_frontend_multiprocessing: bool = flag(False, "Run the engine in the server's process; for debugging.")
