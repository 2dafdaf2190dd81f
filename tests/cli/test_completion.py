"""The completion script, asked by a real bash what it would offer."""

import shutil
import subprocess

import pytest

from vllm_clone.entrypoints.cli.completion import SHELLS, script

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash")


def offered(*words: str) -> list[str]:
    """What comes after the words, the last of which is being typed."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _vllm; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        [str(BASH), "-c", script("bash") + ask, "bash", "vllm", *words], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


def test_commands():
    assert {"serve", "chat", "run-batch"} <= set(offered(""))
    assert offered("ser") == ["serve"]


def test_flags_of_the_command():
    assert offered("serve", "--max-model-l") == ["--max-model-len"]
    assert "--resume" in offered("run-batch", "--re")
    assert "--resume" not in offered("serve", "--re")
    assert offered("bench", "serve", "--request-r") == ["--request-rate"]
    assert "--no-enable-prefix-caching" in offered("serve", "--no-enable-pre")


def test_values_of_flags_and_places():
    assert offered("serve", "model", "--dtype", "bf") == ["bfloat16"]
    assert offered("bench", "") == ["serve", "latency", "startup"]
    assert offered("bench", "latency", "--batch") == ["--batch-size"]
    assert offered("bench", "startup", "--dtype", "bf") == ["bfloat16"]
    assert offered("completion", "z") == ["zsh"]


def test_files_where_nothing_else_is_known(tmp_path, monkeypatch):
    (tmp_path / "weights.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert offered("serve", "wei") == ["weights.gguf"]
    assert offered("serve", "m", "--chat-template", "wei") == ["weights.gguf"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_is_bash_or_needs_one_line_to_be(shell):
    body = script(shell).removeprefix("autoload -U +X bashcompinit && bashcompinit\n")
    assert subprocess.run([str(BASH), "-n", "-c", body], capture_output=True).returncode == 0
