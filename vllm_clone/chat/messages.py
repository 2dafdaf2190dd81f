"""Messages as clients send them → messages as templates want them."""

import json
from collections.abc import Sequence
from typing import Any

from vllm_clone.errors import RequestError

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Part type → the field that holds its text."""
MEDIA_PARTS = frozenset(
    ["image_url", "image_pil", "image_embeds", "input_image", "audio_url", "input_audio", "audio_embeds", "video_url"]
)


def normalise(
    messages: Sequence[dict[str, Any]], *, parts: bool, developer_is_system: bool, model: str
) -> list[dict[str, Any]]:
    """Messages for a template.

    Args:
        parts: give content as a list of parts; otherwise text parts are joined by newlines.
        developer_is_system: the template knows no developer role.
        model: name for error messages.

    Raises:
        RequestError: no messages, media for a text model, or a part we do not know.
    """
    if not messages:
        raise RequestError("messages must not be empty.")
    return [_message(m, parts, developer_is_system, model) for m in messages]


def _message(message: dict[str, Any], parts: bool, developer_is_system: bool, model: str) -> dict[str, Any]:
    role = message.get("role")
    out: dict[str, Any] = {"role": "system" if role == "developer" and developer_is_system else role}
    content = message.get("content")
    texts = _texts(content, model)
    if parts:
        out["content"] = [{"type": "text", "text": t} for t in texts]
    elif content is None and role == "assistant":
        out["content"] = None
    else:
        out["content"] = "\n".join(texts)
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            out[key] = message[key]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return out


def _texts(content: Any, model: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [_part_text(part, model) for part in content]


def _part_text(part: Any, model: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS:
        raise RequestError(f"{model} is not a multimodal model; a content part of type {kind!r} cannot be used.")
    if kind not in TEXT_PARTS:
        known = ", ".join(sorted(TEXT_PARTS))
        raise RequestError(f"A content part has the type {kind!r}; text models take {known}.")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"A content part of type {kind!r} needs a string in its field {TEXT_PARTS[kind]!r}.")
    return text


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want arguments as an object, clients send JSON text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError as error:
            raise RequestError(f"The arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": function}
