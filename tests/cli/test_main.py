"""The `vllm` program: which command runs, and how mistakes end."""

import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from vllm_clone.entrypoints.cli import main as main_module
from vllm_clone.entrypoints.cli import to_come
from vllm_clone.entrypoints.cli.main import main
from vllm_clone.errors import ConfigError, EngineDeadError, ModelLoadError
from vllm_clone.version import __version__

HEAVY = ("torch", "transformers", "fastapi", "zmq", "numpy", "uvicorn", "pydantic", "openai", "huggingface_hub")


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version(capsys, flag):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    assert out.startswith(__version__)
    assert out.count("\n") == 1


@pytest.mark.parametrize("command", [*to_come.COMMANDS, *(f"bench {kind}" for kind in to_come.BENCH_KINDS)])
def test_commands_to_come_say_so_and_have_help(fails, capsys, command):
    message, code = fails(*command.split(), "--anything", "1")
    assert f"{command} is not implemented yet; instead: " in message
    assert code == 2
    assert main([*command.split(), "--help"]) == 0
    assert f"usage: vllm {command}" in capsys.readouterr().out


def test_a_mistyped_command_is_told_the_nearest(fails):
    assert fails("srve") == ("unknown command 'srve'; did you mean serve?", 2)
    message, code = fails("xyzzy")
    assert message.startswith("unknown command 'xyzzy'; known commands: serve, chat")
    assert code == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--served-model-name", "x", "M"], "--served-model-name takes every word after it"),
        (["serve", "/no/such/model"], "/no/such/model"),
        (["serve", "M", "--port", "0"], "--port 0: must be between 1 and 65535"),
        (["serve", "M", "--port", "70000"], "--port 70000"),
        (["serve", "M", "--shutdown-timeout", "-1"], "--shutdown-timeout -1: must be at least 0"),
        (["serve", "M", "--sse-keep-alive-interval", "-1"], "--sse-keep-alive-interval -1: must be at least 0"),
        (["serve", "M", "--max-log-len", "-1"], "--max-log-len -1: must be at least 0"),
        (["serve", "M", "--api-key", ""], "--api-key: an empty key"),
        (["serve", "M", "--api-key", "[]"], "--api-key: an empty key"),
        (["serve", "M", "--max-modle-len", "4"], "did you mean --max-model-len"),
        (["serve", "M", "--config", "/no/such.yaml"], "--config /no/such.yaml: No such file"),
        (["chat", "--urll", "x"], "did you mean --url?"),
        (["complete", "--max-tokens", "x"], "--max-tokens: invalid int value: 'x'"),
        (["collect-env", "x"], "unexpected argument 'x'"),
    ],
)
def test_a_wrong_command_line_ends_with_2(fails, argv, message):
    line, code = fails(*argv)
    assert message in line
    assert code == 2


def test_a_broken_environment_variable_ends_with_2_before_anything_is_read(fails, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "LOUD")
    line, code = fails("serve", "M")
    assert line.startswith("VLLM_LOGGING_LEVEL=LOUD: must be one of")
    assert code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong\n  value"), 2),
        (ModelLoadError("wrong value"), 1),
        (EngineDeadError("wrong value"), 1),
        (OSError("wrong value"), 1),
    ],
)
def test_errors_of_a_command_become_one_line_and_an_exit_code(fails, monkeypatch, error, code):
    def run(args):
        raise error

    monkeypatch.setattr(
        main_module.importlib, "import_module", lambda name: SimpleNamespace(add_arguments=lambda parser: None, run=run)
    )
    assert fails("serve") == ("wrong value", code)


def test_ctrl_c_ends_with_130(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        main_module.importlib, "import_module", lambda name: SimpleNamespace(add_arguments=lambda parser: None, run=run)
    )
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["serve", "--help=all"], ["serve", "M", "--bad-flag"]])
def test_nothing_heavy_is_imported_before_it_is_needed(argv):
    code = (
        "import sys\n"
        "from vllm_clone.entrypoints.cli.main import main\n"
        f"main({argv!r})\n"
        f"print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_short_question_is_answered_at_once(flag):
    """Half a second is what a person calls at once; the bound leaves room for a busy machine."""
    command = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", flag]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 1


def test_resolving_a_configuration_imports_no_torch():
    code = (
        "import sys\nimport vllm_clone.engine.arg_utils\nfrom vllm_clone import SamplingParams\nSamplingParams()\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'fastapi', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_reader_that_stops_reading_is_no_error():
    code = "from vllm_clone.entrypoints.cli.main import main; raise SystemExit(main(['serve', '--help=all']))"
    reader = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" | head -1'],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert reader.stdout.startswith("usage: vllm serve")
    assert reader.stderr == ""
