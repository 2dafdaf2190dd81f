"""What `vllm run-batch` is told besides the engine's flags."""

import dataclasses
from dataclasses import dataclass

from vllm_clone.config.flags import flag
from vllm_clone.config.frontend import FrontendConfig

SHARED = (
    "lora_modules", "chat_template", "chat_template_content_format", "trust_request_chat_template",
    "default_chat_template_kwargs", "response_role", "return_tokens_as_token_ids", "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none", "tool_call_parser", "tool_parser_plugin", "tool_strict_level",
    "tool_server", "log_config_file", "max_log_len", "enable_prompt_tokens_details", "enable_per_request_metrics",
    "enable_log_outputs", "log_error_stack", "fingerprint_mode", "fingerprint_value",
)  # fmt: skip
"""The fields of FrontendConfig that mean something without HTTP."""


@dataclass
class BatchFilesConfig:
    """Where a batch comes from and goes to."""

    input_file: str | None = flag(
        None, "Requests, one JSON object a line: a path, an http(s) URL, or - for standard input.", aliases=("-i",)
    )
    output_file: str | None = flag(
        None,
        "Results, one line each as they finish: a path, an http(s) URL that takes PUT, or - for standard output.",
        aliases=("-o",),
    )
    output_tmp_dir: str | None = flag(
        None, "Directory for the file that is uploaded when the output is a URL; the system's own when not given."
    )
    resume: bool = flag(
        False, "Keep the results that the output file already holds and run only the other lines.", one_way=True
    )
    enable_metrics: bool = flag(False, "Serve Prometheus metrics on --host and --port while the batch runs.")
    host: str | None = flag(None, "Address of the metrics server; all interfaces when not given.", nullable=True)
    port: int = flag(8000, "Port of the metrics server.")
    config: str | None = flag(None, "YAML file with flags; typed flags win over it.")


_fields = {f.name: f for f in dataclasses.fields(FrontendConfig)}
BatchFrontend = dataclasses.make_dataclass(
    "BatchFrontend",
    [
        (name, FrontendConfig.__annotations__[name], dataclasses.field(
            default=_fields[name].default, default_factory=_fields[name].default_factory,
            metadata=_fields[name].metadata,
        ))
        for name in SHARED
    ],
)  # fmt: skip
BatchFrontend.__doc__ = "How requests become prompts and answers."
BatchFrontend.__module__ = __name__
