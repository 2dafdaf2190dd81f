"""Finding a model's files and reading what describes it. Never touches the network for local paths or offline."""

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_clone import envs
from vllm_clone.errors import ConfigError
from vllm_clone.hub.gguf import MAGIC, GGUFFile
from vllm_clone.hub.gguf_config import config_from_gguf, generation_config_from_gguf

TOKENIZER_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja"]
PATTERNS = [*TOKENIZER_PATTERNS, "*.safetensors", "*.bin", "*.pt"]
TEMPLATES = "additional_chat_templates/"
"""The only folder of a hub repository that holds something of use."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is: a directory in Hugging Face layout, or one GGUF file."""

    path: Path
    format: Literal["hf", "gguf"]


def is_offline() -> bool:
    return bool(envs.HF_HUB_OFFLINE or envs.TRANSFORMERS_OFFLINE)


def resolve_model(
    model: str, revision: str | None = None, download_dir: str | None = None, ignore: Sequence[str] = ()
) -> ModelFiles:
    """Files of a local path or a hub id; ``owner/name:Q4_K_M`` picks a GGUF file by a part of its name.

    Files of the hub that match one of the ``ignore`` patterns are not fetched.

    Raises:
        ConfigError: not there, or not a model.
    """
    path = _existing(model)
    if path is not None:
        return _local(path)
    repository, _, part = model.partition(":")
    path = _download(repository, revision, download_dir, [f"*{part}*.gguf"] if part else PATTERNS, ignore)
    if not part:
        return _local(path)
    found = sorted(path.glob(f"*{part}*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ConfigError(f"Model {model}: exactly one GGUF file of {repository} must match {part}; found {names}.")
    return _local(found[0])


def resolve_tokenizer(tokenizer: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """A tokenizer's directory or .gguf file, from a local path or a hub id, of which no weights are fetched.

    Raises:
        ConfigError: not there.
    """
    path = _existing(tokenizer)
    return path if path is not None else _download(tokenizer, revision, download_dir, TOKENIZER_PATTERNS)


def _existing(name: str) -> Path | None:
    """The path that ``name`` is; None when it can only be a hub id."""
    try:
        path = Path(name).expanduser()
        exists = bool(name) and path.exists()
    except (OSError, RuntimeError) as error:  # a name longer than the system allows, an unknown home directory
        raise ConfigError(f"Model {name} is not a usable path: {error}") from error
    if exists:
        return path
    looks_local = name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".safetensors", ".bin"))
    if not name or looks_local or name.count("/") > 1:
        raise ConfigError(f"Model {name} does not exist; give a local directory, a .gguf file, or a hub id owner/name.")
    return None


def _local(path: Path) -> ModelFiles:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == MAGIC:
                return ModelFiles(path.resolve(), "gguf")
        raise ConfigError(f"Model {path} is a file but not GGUF; give its directory, or a .gguf file.")
    if not (path / "config.json").exists():
        candidates = sorted(path.glob("*.gguf"))
        if len(candidates) == 1:
            return ModelFiles(candidates[0].resolve(), "gguf")
        if candidates:
            names = ", ".join(c.name for c in candidates)
            raise ConfigError(f"Model directory {path} holds several GGUF files; name one of them: {names}.")
        raise ConfigError(f"Model directory {path} has no config.json; is it a complete Hugging Face checkpoint?")
    return ModelFiles(path.resolve(), "hf")


def _download(
    model: str, revision: str | None, download_dir: str | None, patterns: list[str], ignore: Sequence[str] = ()
) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=_needed(model, revision, patterns),
                ignore_patterns=list(ignore),
                local_files_only=is_offline(),
            )
        )
    except HFValidationError as error:
        raise ConfigError(f"Model {model!r} is neither a local path nor a hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        why = "offline mode is on (HF_HUB_OFFLINE)" if is_offline() else "the hub cannot be reached"
        raise ConfigError(
            f"Model {model} is not in the local cache and {why}; give a local path or download it first."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"Model {model} cannot be fetched from the hub: {reason}") from error


def _needed(model: str, revision: str | None, patterns: list[str]) -> list[str]:
    """The files worth fetching: one set of weights, although many repositories hold them in several formats.

    Offline, or when the hub does not list its files, these are the patterns themselves.
    """
    if is_offline():
        return patterns
    import huggingface_hub

    try:
        names = huggingface_hub.HfApi().list_repo_files(model, revision=revision)
    except Exception:  # the download itself will tell what is wrong, or find all it needs in the cache
        return patterns
    names = [n for n in names if "/" not in n or n.startswith(TEMPLATES)]
    needed = [n for n in names if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
    weights = [n for n in needed if n.endswith(".safetensors") and not n.startswith("consolidated")]
    if weights:
        needed = [n for n in needed if n in weights or not n.endswith((".safetensors", ".bin", ".pt"))]
    files = [n for n in names if n.endswith(".gguf")]
    if patterns is PATTERNS and "config.json" not in names and files:
        if len(files) > 1:
            raise ConfigError(f"Model {model} holds several GGUF files; add a part of a name, as {model}:Q4_K_M.")
        needed = files
    return needed or patterns


def weight_files(path: str | Path) -> list[Path]:
    """Files of weights of a model directory, in one format only; or the one .gguf file."""
    path = Path(path)
    if path.is_file():
        return [path]
    found = (sorted(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt"))
    return next((files for files in found if files), [])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: not readable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def load_hf_config(files: ModelFiles) -> dict[str, Any]:
    """config.json, or the same facts from GGUF metadata."""
    if files.format == "gguf":
        return config_from_gguf(GGUFFile(files.path, vocabulary=False))
    return read_json(files.path / "config.json")


def load_generation_config(files: ModelFiles) -> dict[str, Any]:
    """generation_config.json or the same facts from GGUF metadata; {} when there are none."""
    if files.format == "gguf":
        return generation_config_from_gguf(GGUFFile(files.path, vocabulary=False))
    path = files.path / "generation_config.json"
    return read_json(path) if path.exists() else {}
