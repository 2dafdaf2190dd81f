"""The examples run as they stand in the repository."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.server import Server, smollm2_gguf

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openai_client(smollm2: Server) -> None:
    out = _run(str(EXAMPLES / "openai_client.py"), "--url", smollm2.url + "/v1")
    at_once, streamed = out.strip().split("streamed: ")
    assert "Paris" in at_once
    assert streamed.strip() == at_once.removeprefix("at once: ").strip()


def test_structured_outputs() -> None:
    choice, date, person, sentence = _run(str(EXAMPLES / "structured_outputs.py"), smollm2_gguf()).splitlines()[-4:]
    assert choice.endswith(("→ positive", "→ negative"))
    assert re.search(r"→ \d{4}-\d\d-\d\d$", date)
    assert set(json.loads(person.partition("→ ")[2])) == {"name", "age"}
    assert sentence.endswith("years old")


def test_offline() -> None:
    out = _run(str(EXAMPLES / "offline.py"), smollm2_gguf())
    assert "Paris" in out.split("chat:")[1]
