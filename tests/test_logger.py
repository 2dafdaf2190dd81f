"""Log lines, seen from outside: a process that logs."""

import json
import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import logging
from vllm_clone.logger import init_logger, log_once, set_process_name
logger = init_logger("vllm_clone.somewhere")
logger.info("first %d", 1)
set_process_name("EngineCore")
logger.warning("two\\nlines")
logger.debug("hidden")
for _ in range(3):
    log_once(logger, logging.INFO, "only once")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
"""


@pytest.fixture
def log():
    """stdout and stderr of the program under extra environment variables."""

    def run(**environment: str) -> tuple[list[str], list[str]]:
        plain = {
            k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k not in ("NO_COLOR", "FORCE_COLOR")
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=plain | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.splitlines(), done.stderr.splitlines()

    return run


def test_a_line_names_process_level_time_and_place(log):
    out, err = log()
    assert re.fullmatch(r"\(APIServer pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[<string>:5\] first 1", out[0])
    assert err == []


def test_every_line_of_a_message_and_of_a_traceback_has_the_prefix(log):
    out, _ = log()
    warnings = [line for line in out if " WARNING " in line]
    assert [line.split("] ")[1] for line in warnings] == ["two", "lines"]
    assert all(line.startswith("(EngineCore pid=") for line in warnings)
    errors = [line.split("] ")[1] for line in out if " ERROR " in line]
    assert errors[:2] == ["failed", "Traceback (most recent call last):"]
    assert errors[-1] == "ZeroDivisionError: division by zero"


def test_levels_and_repetitions_are_kept_out(log):
    out, _ = log()
    assert not any("hidden" in line for line in out)
    assert sum("only once" in line for line in out) == 1
    assert any("hidden" in line for line in log(VLLM_LOGGING_LEVEL="debug")[0])


def test_stream_and_prefix_can_be_chosen(log):
    out, err = log(VLLM_LOGGING_STREAM="ext://sys.stderr", VLLM_LOGGING_PREFIX="[node1] ")
    assert out == []
    assert err[0].startswith("[node1] (APIServer pid=")


def test_colours_come_when_forced_and_not_otherwise(log):
    assert not any("\033" in line for line in log()[0])
    assert any("\033[33mWARNING" in line for line in log(FORCE_COLOR="1")[0])
    assert any("\033" in line for line in log(VLLM_LOGGING_COLOR="1", NO_COLOR="1")[0])
    assert not any("\033" in line for line in log(FORCE_COLOR="1", NO_COLOR="1")[0])
    assert not any("\033" in line for line in log(FORCE_COLOR="1", VLLM_LOGGING_COLOR="0")[0])


def test_logging_can_be_left_alone_or_set_up_by_a_file(log, tmp_path):
    out, err = log(VLLM_CONFIGURE_LOGGING="0")
    assert out == []
    assert err[0] == "two"  # the standard library's last resort: warnings, bare, on stderr
    path = tmp_path / "logging.json"
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "formatters": {"f": {"format": "mine %(message)s"}},
                "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f", "stream": "ext://sys.stdout"}},
                "loggers": {"vllm_clone": {"handlers": ["h"], "level": "INFO"}},
            }
        )
    )
    assert log(VLLM_LOGGING_CONFIG_PATH=str(path))[0][0] == "mine first 1"
