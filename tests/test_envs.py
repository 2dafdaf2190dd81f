"""Environment variables: read when used, checked at start."""

import os
import re

import pytest

from vllm_clone import envs


def test_an_unset_or_empty_variable_has_its_default(monkeypatch):
    monkeypatch.delenv("VLLM_MAX_N_SEQUENCES", raising=False)
    assert envs.VLLM_MAX_N_SEQUENCES == 16384
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "")
    assert envs.VLLM_MAX_N_SEQUENCES == 16384


def test_a_variable_is_read_when_it_is_used(monkeypatch):
    for value in (1, 2):
        monkeypatch.setenv("VLLM_CPU_THREADS", str(value))
        assert value == envs.VLLM_CPU_THREADS


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_switches(monkeypatch, text, value):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", text)
    assert envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN is value


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("0", 10.0), ("-3", 10.0), ("inf", 10.0)])
def test_a_statistics_interval_that_makes_no_sense_is_ten_seconds(monkeypatch, text, seconds):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", text)
    assert seconds == envs.VLLM_LOG_STATS_INTERVAL


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("VLLM_CPU_THREADS", "two", "must be a whole number, at least 0"),
        ("VLLM_CPU_THREADS", "-1", "must be a whole number, at least 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "nan", "must be a number, at least 0"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "-1", "must be a number, at least 0"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "must be one of CRITICAL"),
        ("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "maybe", "must be 1 or 0"),
        ("VLLM_CPU_ISA", "mmx", "must be one of"),
        ("VLLM_LOG_STATS_INTERVAL", "often", "must be a number of seconds"),
        ("VLLM_CPU_OMP_THREADS_BIND", "all", "must be auto, nobind, or cores such as 0-3 or 0,2-5"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0:2", "must be auto, nobind, or cores"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0,", "must be core numbers and ranges such as 0-3,8"),
        ("VLLM_CPU_OMP_THREADS_BIND", "-3", "must be core numbers and ranges"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-3-5", "must be core numbers and ranges"),
        ("VLLM_CPU_OMP_THREADS_BIND", "1 2", "must be core numbers and ranges"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-3|3-1", "the range 3-1 descends"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-3,2", "a core is named twice"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-99999999999", "no core has the number 99999999999"),
        ("VLLM_CPU_NUM_OF_RESERVED_CPU", "one", "must be a whole number, at least 0"),
    ],
)
def test_a_wrong_text_is_reported_with_name_and_rule(monkeypatch, name, text, rule):
    monkeypatch.setenv(name, text)
    (problem,) = envs.problems()
    assert problem.startswith(f"{name}={text}: {rule}")
    with pytest.raises(ValueError, match=re.escape(f"{name}={text}")):
        getattr(envs, name)


@pytest.mark.parametrize(
    ("text", "lists"),
    [("auto", "auto"), (" NoBind ", "nobind"), ("3", [[3]]), ("0-2, 8", [[0, 1, 2, 8]]), ("4-5|0", [[4, 5], [0]])],
)
def test_cores_are_lists_for_ranks_or_a_word(monkeypatch, text, lists):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", text)
    assert lists == envs.VLLM_CPU_OMP_THREADS_BIND


def test_an_engine_gets_no_other_pools_of_threads_unless_they_are_asked_for(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    environment = envs.of_engine()
    assert (environment["OMP_NUM_THREADS"], environment["OPENBLAS_NUM_THREADS"]) == ("1", "3")
    assert environment["PATH"] == os.environ["PATH"]


def test_names_that_look_like_ours_but_are_not_are_told(monkeypatch):
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "DEBUG")
    assert envs.unknown_names() == ["VLLM_LOGING_LEVEL"]
    assert "VLLM_LOGING_LEVEL" in envs.names_set()
    with pytest.raises(AttributeError, match="VLLM_LOGING_LEVEL"):
        _ = envs.VLLM_LOGING_LEVEL


def test_every_default_is_a_value_the_variable_can_have():
    for name, variable in envs.VARIABLES.items():
        if variable.default not in (None, ""):
            text = {True: "1", False: "0"}.get(variable.default, str(variable.default))
            assert variable.parse(text) == variable.default, name
