"""`vllm collect-env`."""

import platform

import torch

from vllm_clone.entrypoints.cli.main import main
from vllm_clone.kernels.cpu import ops


def report(capsys) -> dict[str, str]:
    assert main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_names_system_python_processor_and_packages(capsys):
    facts = report(capsys)
    assert facts["operating system"] == platform.platform()
    assert facts["python"].startswith(platform.python_version())
    assert facts["torch"] == torch.__version__
    assert facts["instruction sets"]
    assert facts["memory"].endswith("GiB available")
    assert facts["cpu kernels"] == f"{ops.active_level()} of {' '.join(ops.available_levels())}"
    assert facts["amx tiles"] == (ops.amx_state() or "not in this processor")
    assert int(facts["usable cores"]) >= 1


def test_secrets_in_the_environment_are_masked(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_SOME_TOKEN", "hush")
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "node1 ")
    facts = report(capsys)
    assert facts["VLLM_API_KEY"] == facts["VLLM_SOME_TOKEN"] == "***"
    assert facts["VLLM_LOGGING_PREFIX"] == "node1"
