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
    """Messages for a template. Content that is missing or null is empty text: templates would print "None".

    Args:
        parts: give content as a list of parts; otherwise text parts are joined by newlines.
        developer_is_system: the template knows no developer role.
        model: name for error messages.

    Raises:
        RequestError: no messages, media for a text model, or a part we do not know.
    """
    if not messages:
        raise RequestError("messages must not be empty.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("Each message must be an object with a string role.")
    return [_message(m, parts, developer_is_system, model) for m in messages]


def _message(message: dict[str, Any], parts: bool, developer_is_system: bool, model: str) -> dict[str, Any]:
    role = message.get("role")
    out: dict[str, Any] = {"role": "system" if role == "developer" and developer_is_system else role}
    content = message.get("content")
    texts = _texts(content, model)
    out["content"] = [{"type": "text", "text": t} for t in texts] if parts else "\n".join(texts)
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            out[key] = message[key]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise RequestError("tool_calls must be a list.")
        out["tool_calls"] = [_tool_call(call) for call in calls]
    return out


def _texts(content: Any, model: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise RequestError(f"A message's content must be text or a list of parts, not {type(content).__name__}.")
    return [_part_text(part, model) for part in content]


def _part_text(part: Any, model: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError('A content part must be an object with a "type".')
    if kind in MEDIA_PARTS:
        raise RequestError(f"{model} is not a multimodal model; a content part of type {kind!r} cannot be used.")
    if kind not in TEXT_PARTS:
        known = ", ".join(sorted(TEXT_PARTS))
        raise RequestError(f"A content part has the type {kind!r}; text models take {known}.")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"A content part of type {kind!r} needs a string in its field {TEXT_PARTS[kind]!r}.")
    return text


def _tool_call(call: Any) -> dict[str, Any]:
    """Templates want arguments as an object, clients send JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError("A tool call must be an object with a function.")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
