"""--config FILE: YAML with flags, of which typed ones win."""

from pathlib import Path
from typing import Any

import pytest

from vllm_clone.entrypoints.cli import config_file, serve
from vllm_clone.entrypoints.cli.parser import FlagParser, UsageError
from vllm_clone.errors import ConfigError


@pytest.fixture
def parse(tmp_path: Path):
    """Parse a command line in which FILE stands for a file with the given YAML."""

    def run(yaml: str | bytes, *argv: str) -> dict[str, Any]:
        path = tmp_path / "c.yaml"
        path.write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        words = [a.replace("FILE", str(path)) for a in argv or ("--config", "FILE")]
        parser = FlagParser("vllm serve", serve.USAGE, "Serve.")
        serve.add_arguments(parser)
        given = vars(parser.parse(words))
        assert given.pop("config") == str(path)
        return {k: v for k, v in given.items() if not (k == "model_tag" and v is None)}

    return run


@pytest.mark.parametrize(
    ("yaml", "values"),
    [
        ("port: 9", {"port": 9}),
        ("max_model_len: 1k", {"max_model_len": 1000}),
        ("max-model-len: 512", {"max_model_len": 512}),
        ("model: X", {"model": "X"}),
        ("enable-prefix-caching: true", {"enable_prefix_caching": True}),
        ("enable-prefix-caching: false", {"enable_prefix_caching": False}),
        ("disable-log-stats: true", {"disable_log_stats": True}),
        ("disable-log-stats: false", {}),
        ("served-model-name: [a, b]", {"served_model_name": ["a", "b"]}),
        ('allowed-origins: ["*"]', {"allowed_origins": ["*"]}),
        ("hf-overrides: {a: {b: 1}}", {"hf_overrides": {"a": {"b": 1}}}),
        ("hf-overrides: {when: 2026-01-01}", {"hf_overrides": {"when": "2026-01-01"}}),
        ("port: null", {}),
        ("response-role: --odd", {"response_role": "--odd"}),
        ("chat-template: |\n  a\n    b\n", {"chat_template": "a\n  b\n"}),
        ("", {}),
        ("# nothing\n", {}),
    ],
)
def test_entries(parse, yaml, values):
    assert parse(yaml) == values


def test_a_typed_flag_wins_wherever_it_stands(parse):
    assert parse("port: 1", "--port", "9", "--config", "FILE")["port"] == 9
    assert parse("port: 1", "--config", "FILE", "--port", "9")["port"] == 9


def test_one_word_works_too(parse):
    assert parse("port: 1", "--config=FILE") == {"port": 1}


def test_a_list_in_the_file_does_not_swallow_the_typed_model(parse):
    assert parse("served-model-name: [a, b]", "M", "--config", "FILE") == {
        "model_tag": "M",
        "served_model_name": ["a", "b"],
    }
    assert parse("served-model-name: [a]", "--config", "FILE", "M")["model_tag"] == "M"


@pytest.mark.parametrize(
    ("yaml", "error", "message"),
    [
        ("port: abc", UsageError, "--port abc: not a whole number"),
        ("unknown-key: 1", UsageError, "flag --unknown-key"),
        ("config: other.yaml", ConfigError, "names another config file"),
        ("- a\n- b", ConfigError, "must map flag names to values"),
        ("port: [1\n", ConfigError, "not valid YAML in line"),
        ("a: b: c", ConfigError, "not valid YAML in line 1"),
        (b"port: \xff\xfe", ConfigError, "not valid YAML"),
    ],
)
def test_wrong_files(parse, yaml, error, message):
    with pytest.raises(error) as caught:
        parse(yaml)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "no file given"),
        (["--config", "a.yaml", "--config", "b.yaml"], "may be given once"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: No such file or directory"),
        (["--config", "/"], "--config /: Is a directory"),
    ],
)
def test_wrong_uses(argv, message):
    def read():
        config_file.flags_in(config_file.named_file(argv), frozenset())

    with pytest.raises(ConfigError, match=message):
        read()
