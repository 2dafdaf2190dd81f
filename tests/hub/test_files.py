"""Finding a model: local first, the hub only for ids, and one line when it is not there."""

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.gguf_bytes import LLAMA, gguf_bytes, write
from vllm_clone.errors import ConfigError
from vllm_clone.hub import load_generation_config, load_hf_config, read_json, resolve_model, resolve_tokenizer


def checkpoint(path: Path, config: str = "{}") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    return path


def refused(model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_with_config_json_is_a_hugging_face_model(tmp_path: Path) -> None:
    files = resolve_model(str(checkpoint(tmp_path)))
    assert (files.path, files.format) == (tmp_path.resolve(), "hf")


def test_a_gguf_file_is_a_model_whatever_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.bin", LLAMA)
    assert resolve_model(str(path)).format == "gguf"


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA)
    files = resolve_model(str(tmp_path))
    assert (files.path, files.format) == (path.resolve(), "gguf")
    checkpoint(tmp_path)
    assert resolve_model(str(tmp_path)).format == "hf"


def test_a_directory_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    write(tmp_path / "b.gguf", LLAMA)
    write(tmp_path / "a.gguf", LLAMA)
    assert "several GGUF files; name one of them: a.gguf, b.gguf" in refused(str(tmp_path))


def test_a_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    assert "has no config.json" in refused(str(tmp_path))


def test_another_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("not it")
    assert "is a file but not GGUF" in refused(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "none.gguf", "a/b/c", "~/none-such", ""])
def test_a_missing_path_never_becomes_a_hub_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_clone.hub.files._download", lambda *a: pytest.fail("asked the hub"))
    assert "does not exist" in refused(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~no_such_user_here/model"])
def test_a_name_the_system_cannot_take_is_refused(name: str) -> None:
    assert "is not a usable path" in refused(name)


def test_offline_says_so_and_what_to_do() -> None:
    assert "is not in the local cache and offline mode is on" in refused("owner/surely-not-cached")


def test_a_name_that_is_no_hub_id_is_refused() -> None:
    assert "is neither a local path nor a hub id" in refused("no spaces here/please")


def test_a_hub_id_is_downloaded_to_where_it_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot(repo: str, **kwargs: object) -> str:
        asked.update(kwargs, repo=repo)
        return str(checkpoint(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    files = resolve_model("owner/name", revision="v1", download_dir="/models")
    assert files.path == (tmp_path / "snapshot").resolve()
    assert (asked["repo"], asked["revision"], asked["cache_dir"]) == ("owner/name", "v1", "/models")
    assert asked["local_files_only"] is True
    assert "*.safetensors" in asked["allow_patterns"]  # type: ignore[operator]


def test_a_tokenizer_needs_no_config_and_fetches_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot(repo: str, **kwargs: object) -> str:
        asked.update(kwargs)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_tokenizer("owner/name") == tmp_path
    assert "*.safetensors" not in asked["allow_patterns"]  # type: ignore[operator]
    assert resolve_tokenizer(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_tokenizer("/no/such/tokenizer")


class FakeHub:
    """A hub with one repository; remembers what was asked for and puts those files into a folder."""

    def __init__(self, folder: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.files = folder, files
        self.asked: list[str] = []
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda api, repo, revision: list(files))

    def snapshot_download(self, repo: str, *, allow_patterns: list[str], **kwargs: object) -> str:
        assert repo == "owner/name"
        self.folder.mkdir()
        self.asked = sorted(n for n in self.files if any(fnmatch.fnmatch(n, p) for p in allow_patterns))
        for name in self.asked:
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(self.files[name])
        return str(self.folder)


GGUF = gguf_bytes(LLAMA)


@pytest.mark.parametrize(
    ("held", "fetched"),
    [
        (
            ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "README.md",
             "tokenizer.json", "original/consolidated.pth", "onnx/model.bin", "additional_chat_templates/rag.jinja"],
            ["additional_chat_templates/rag.jinja", "config.json", "model.safetensors", "tokenizer.json"],
        ),
        (["config.json", "pytorch_model.bin"], ["config.json", "pytorch_model.bin"]),
        (["config.json", "model.safetensors", "x.Q8_0.gguf"], ["config.json", "model.safetensors"]),
        (["README.md", "x.Q8_0.gguf"], ["x.Q8_0.gguf"]),
    ],
)  # fmt: skip
def test_one_set_of_weights_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[str], fetched: list[str]
) -> None:
    hub = FakeHub(tmp_path / "snapshot", dict.fromkeys(held, GGUF), monkeypatch)
    resolve_model("owner/name")
    assert hub.asked == fetched


def test_a_part_of_its_name_picks_a_gguf_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(["config.json", "x.Q4_K_M.gguf", "x.Q8_0.gguf"], GGUF)
    hub = FakeHub(tmp_path / "snapshot", files, monkeypatch)
    found = resolve_model("owner/name:Q8_0")
    assert (found.path.name, found.format, hub.asked) == ("x.Q8_0.gguf", "gguf", ["x.Q8_0.gguf"])


def test_a_choice_of_gguf_files_must_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(["x.Q4_K_M.gguf", "x.Q4_K_S.gguf"], GGUF)
    FakeHub(tmp_path / "snapshot", files, monkeypatch)
    assert "several GGUF files; add a part of a name, as owner/name:Q4_K_M" in refused("owner/name")
    assert "must match Q4; found x.Q4_K_M.gguf, x.Q4_K_S.gguf" in refused("owner/name:Q4")
    FakeHub(tmp_path / "again", files, monkeypatch)
    assert "must match F16; found none" in refused("owner/name:F16")


def test_a_hub_that_lists_nothing_may_still_deliver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path / "snapshot", {"config.json": b"{}", "model.safetensors": b""}, monkeypatch)

    def unreachable(*args: object, **kwargs: object) -> list[str]:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", unreachable)
    assert resolve_model("owner/name").format == "hf"
    assert hub.asked == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": }', "[" * 100_000, "\ufeff{}"])
def test_broken_json_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json (cannot be read as JSON|must hold a JSON object)"):
        load_hf_config(resolve_model(str(checkpoint(tmp_path, text))))


def test_json_that_is_not_text_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"x\.json cannot be read"):
        read_json(tmp_path / "x.json")


def test_config_and_generation_config_are_returned_as_they_are(tmp_path: Path) -> None:
    files = resolve_model(str(checkpoint(tmp_path, json.dumps({"architectures": ["A"], "x": [1]}))))
    assert load_hf_config(files) == {"architectures": ["A"], "x": [1]}
    assert load_generation_config(files) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert load_generation_config(files) == {"temperature": 0.5}


def test_importing_the_room_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "tokenizers", "numpy", "jinja2")
    code = f"import sys, vllm_clone.hub; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
