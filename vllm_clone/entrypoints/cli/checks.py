"""What the server's own flags must fulfil, alone and together; each failure is one line."""

from vllm_clone.config import FrontendConfig, ServeConfig
from vllm_clone.entrypoints.launchers.tls import tls_options
from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.logger import use_config_file

MAX_API_SERVERS = 256
AT_LEAST = {
    "shutdown_timeout": 0,
    "sse_keep_alive_interval": 0,
    "max_log_len": 0,
    "h11_max_incomplete_event_size": 1,
    "h11_max_header_count": 1,
}
"""Field → its smallest value."""


def check_serve(serve: ServeConfig, frontend: FrontendConfig, *, step_line: bool) -> None:
    """Look at what `vllm serve` starts. ``step_line``: whether the statistics line shall count steps.

    Raises:
        ConfigError: flag, value, rule and remedy.
    """
    count = serve.api_server_count
    if count is not None and not 1 <= count <= MAX_API_SERVERS:
        raise ConfigError(f"--api-server-count {count}: must be in [1, {MAX_API_SERVERS}].")
    if count not in (None, 1) and step_line:
        raise ConfigError("--cudagraph-metrics: several API servers write no statistics line; leave it out.")
    if count not in (None, 1) and frontend.disable_frontend_multiprocessing:
        raise ConfigError(
            f"--api-server-count {count}: API servers in processes of their own cannot share an engine in this one; "
            "leave --disable-frontend-multiprocessing out."
        )


def check_frontend(frontend: FrontendConfig, *, log_requests: bool, log_stats: bool) -> None:
    """Look at everything that can be wrong before the engine starts, and set up logging.

    Raises:
        ConfigError: flag, value, rule and remedy.
    """
    if not 0 < frontend.port < 65536:
        raise ConfigError(f"--port {frontend.port}: must be between 1 and 65535.")
    for name, least in AT_LEAST.items():
        value = getattr(frontend, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}.")
    if frontend.api_key is not None and not (frontend.api_key and all(frontend.api_key)):
        raise ConfigError("--api-key: an empty key would let everyone in; give a key or leave the flag out.")
    if frontend.enable_log_outputs and not log_requests:
        raise ConfigError("--enable-log-outputs: needs --enable-log-requests too.")
    if frontend.enable_per_request_metrics and not log_stats:
        raise ConfigError("--enable-per-request-metrics: needs statistics; leave --disable-log-stats out.")
    if frontend.enable_offline_docs and frontend.disable_fastapi_docs:
        raise ConfigError("--enable-offline-docs: contradicts --disable-fastapi-docs; leave one of them out.")
    if (frontend.fingerprint_mode == "custom") is not (frontend.fingerprint_value is not None):
        raise ConfigError("--fingerprint-mode custom and --fingerprint-value TEXT need each other.")
    tls_options(frontend)
    _check_named_code(frontend)
    if frontend.log_config_file is not None:
        try:
            use_config_file(frontend.log_config_file)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--log-config-file {frontend.log_config_file}: {reason}.") from error


def _check_named_code(frontend: FrontendConfig) -> None:
    if frontend.middleware:
        from vllm_clone.entrypoints.launchers.app import load_middleware

        for name in frontend.middleware:
            load_middleware(name)
    if frontend.chat_template is not None:
        from vllm_clone.chat import load_template

        try:
            load_template(frontend.chat_template)
        except RequestError as error:
            raise ConfigError(f"--chat-template: {error.message}") from error
