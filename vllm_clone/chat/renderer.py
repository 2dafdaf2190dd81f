"""ChatRenderer: messages → prompt text."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_clone.chat.messages import normalise
from vllm_clone.chat.template import render, wants_content_parts
from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.tokenizers import Tokenizer

ContentFormat = Literal["auto", "string", "openai"]
PROTECTED = frozenset(["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"])
"""Names chat_template_kwargs cannot override."""


def load_template(value: str | None) -> str | None:
    """``--chat-template``: a file's content, or the value itself when it looks like a template.

    Raises:
        ConfigError: neither a readable file nor a template.
    """
    if value is None:
        return None
    if any(mark in value for mark in ("{{", "{%", "\n")):
        return value.replace("\\n", "\n")
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--chat-template {value}: {reason}; give a readable file or the template itself.") from error


class ChatRenderer:
    """Renders conversations with the model's template.

    Args:
        tokenizer: supplies the template and the special tokens' texts.
        chat_template: template that replaces the tokenizer's.
        content_format: how content reaches the template; auto looks at the template.
        model: name for error messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        content_format: ContentFormat = "auto",
        model: str = "This model",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template if chat_template is not None else tokenizer.chat_template
        self._format = content_format
        self._model = model

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, str]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        Raises:
            RequestError: no template, or one that refuses these messages.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true; set the latter false."
            )
        source = self._source(chat_template, tools)
        parts = self.content_format(source) == "openai"
        developer_is_system = "developer" not in source
        normal = normalise(messages, parts=parts, developer_is_system=developer_is_system, model=self._model)
        end = _mark_end(normal[-1]) if continue_final_message else None
        extra = {k: v for k, v in (chat_template_kwargs or {}).items() if k not in PROTECTED}
        variables = {
            **self._tokenizer.special,
            **extra,
            "messages": normal,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = render(source, variables)
        return text if end is None else end.cut(text)

    def _source(self, requested: str | None, tools: list[dict[str, Any]] | None) -> str:
        """A request may bring a template, or name one of the model's."""
        if requested is None:
            return self.template_for(tools)
        return self._template.get(requested, requested) if isinstance(self._template, dict) else requested

    def template_for(self, tools: list[dict[str, Any]] | None) -> str:
        """The template's source; a model with several has one named tool_use for requests with tools."""
        template = self._template
        if isinstance(template, dict):
            template = (template.get("tool_use") if tools else None) or template.get("default")
        if template is None:
            raise RequestError(
                "This model has no chat template; start the server with --chat-template, or use /v1/completions."
            )
        return template

    def content_format(self, source: str | None = None) -> Literal["string", "openai"]:
        if self._format != "auto":
            return self._format
        return "openai" if wants_content_parts(source or self.template_for(None)) else "string"


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a text that a template is about to render, and the mark that shows where it went."""

    text: str
    mark: str

    def cut(self, rendered: str) -> str:
        """What comes before the mark, without the space that the template trimmed from the text's end.

        Raises:
            RequestError: the template left the text out or changed it.
        """
        at = rendered.rfind(self.mark)
        if at < 0 or self.text.strip() not in rendered:
            raise RequestError(
                "continue_final_message: the last message's content does not appear in the rendered prompt."
            )
        is_trimmed = not rendered.startswith(" ", at + len(self.mark))
        return rendered[:at].rstrip() if is_trimmed else rendered[:at]


def _mark_end(message: dict[str, Any]) -> _End:
    """Put a mark at the end of a message's text, followed by a space to see whether the template trims.

    Looking for the text itself would find it elsewhere, for example "end" in the token that ends the turn.
    """
    mark = f"<end-{secrets.token_hex(8)}>"
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}{mark} "
        return _End(content, mark)
    if not content:
        raise RequestError("continue_final_message: the last message has no text to continue.")
    text = content[-1]["text"]
    content[-1]["text"] = f"{text}{mark} "
    return _End(text, mark)
