"""`vllm serve` up to the point where the engine starts."""

import argparse
import contextlib
import os
import socket
from pathlib import Path

import pytest

from vllm_clone.config import FrontendConfig
from vllm_clone.entrypoints.cli import serve
from vllm_clone.entrypoints.cli.serve import claimed_address


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_claimed_port_is_taken_until_it_is_let_go(free_port):
    frontend = FrontendConfig(host="127.0.0.1", port=free_port)
    with claimed_address(frontend) as listener:
        assert listener.getsockname() == ("127.0.0.1", free_port)
        with pytest.raises(OSError, match=rf"--host 127.0.0.1 --port {free_port}: .*in use; stop the other"):
            claimed_address(frontend).__enter__()
    with claimed_address(frontend):
        pass


def test_a_port_that_another_server_left_a_moment_ago_can_be_claimed(free_port):
    frontend = FrontendConfig(host="127.0.0.1", port=free_port)
    with claimed_address(frontend) as listener, socket.create_connection(("127.0.0.1", free_port)):
        listener.setblocking(True)
        listener.accept()[0].close()
    with claimed_address(frontend):
        pass


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_addresses_may_have_brackets(free_port, host):
    with contextlib.suppress(OSError):  # a machine without IPv6
        with claimed_address(FrontendConfig(host=host, port=free_port)) as listener:
            family = listener.family
        assert family == socket.AF_INET6


def test_an_address_of_another_machine_is_refused_with_the_remedy(free_port):
    with pytest.raises(OSError, match=rf"--host 192.0.2.1 --port {free_port}: .*; give an address of this machine"):
        claimed_address(FrontendConfig(host="192.0.2.1", port=free_port)).__enter__()


def test_a_socket_file_is_made_and_removed(tmp_path: Path):
    path = tmp_path / "s"
    with claimed_address(FrontendConfig(uds=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_socket_file_that_a_dead_server_left_is_replaced(tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with claimed_address(FrontendConfig(uds=str(path))):
        pass


def test_the_socket_file_of_a_live_server_is_left_alone(tmp_path: Path):
    path = tmp_path / "s"
    with claimed_address(FrontendConfig(uds=str(path))):
        with pytest.raises(OSError, match=r"--uds .*in use; stop the other server"):
            claimed_address(FrontendConfig(uds=str(path))).__enter__()
        assert path.exists()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="exists and is no socket"):
        claimed_address(FrontendConfig(uds=str(path))).__enter__()
    assert path.read_text() == "data"


def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path):
    with pytest.raises(OSError, match=r"--uds .*too long"):
        claimed_address(FrontendConfig(uds=str(tmp_path / ("x" * 200)))).__enter__()


@pytest.mark.parametrize(
    ("typed", "flag", "config", "model"),
    [
        ("M", None, None, "M"),
        (None, "X", None, "X"),
        ("M", "M", None, "M"),
        ("M", "X", "c.yaml", "M"),
        ("M", "X", None, "M"),
        (None, None, None, "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_model_may_come_by_itself_by_flag_or_from_a_file(typed, flag, config, model):
    args = argparse.Namespace(model_tag=typed, config=config)
    if flag is not None:
        args.model = flag
    assert serve._model_of(args) == model


def test_secrets_are_not_logged(monkeypatch, tmp_path, free_port):
    seen = {}

    def run_server(config, frontend, listener, process, non_default, signals):
        seen.update(non_default, key=frontend.api_key)
        return 0

    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 8}')
    monkeypatch.setattr("vllm_clone.entrypoints.launchers.api_server.run_server", run_server)
    args = argparse.Namespace(
        model_tag=str(tmp_path), config=None, api_key=["hush"], port=free_port, host="127.0.0.1",
        disable_frontend_multiprocessing=True, dtype="float32",
    )  # fmt: skip
    assert serve.run(args) == 0
    assert seen["key"] == ["hush"]
    assert seen["api_key"] == "***"
    assert (seen["dtype"], seen["port"]) == ("float32", free_port)
    assert "max_num_seqs" not in seen
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_port), timeout=5)
    assert os.environ.get("VLLM_API_KEY") is None


def test_of_two_models_the_one_typed_by_itself_is_served_and_the_other_named(capsys):
    serve._model_of(argparse.Namespace(model_tag="M", model="X"))
    assert capsys.readouterr().err == "vllm: warning: M is served, not --model X.\n"
