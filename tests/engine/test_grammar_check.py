"""What the frontend says of structured outputs before the engine sees them."""

import subprocess
import sys

import pytest

from tests.engine.fakes import byte_tokenizer, fake_config
from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.engine import grammar_check
from vllm_clone.engine.grammar_check import GrammarChecker
from vllm_clone.engine.input_processor import InputProcessor
from vllm_clone.errors import RequestError
from vllm_clone.sampling_params import SamplingParams, StructuredOutputsParams

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
NAMES = {"type": "object", "propertyNames": {"pattern": "^a$"}}


def verdict(backend: str, **fields: object) -> str | None:
    config = StructuredOutputsConfig(backend=backend)  # type: ignore[arg-type]
    try:
        GrammarChecker(config).check(StructuredOutputsParams(**fields))  # type: ignore[arg-type]
    except RequestError as error:
        return error.message
    return None


@pytest.mark.parametrize("installed", [True, False])
def test_what_is_wrong_is_said_whatever_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool):
    monkeypatch.setattr(grammar_check, "has_xgrammar", lambda: installed)
    assert "unclosed character class" in (verdict("auto", regex="([") or "")
    assert "nonsense" in (verdict("auto", json={"type": "nonsense"}) or "")
    assert "'foo' not found" in (verdict("auto", grammar="root ::= foo") or "")
    assert verdict("auto", json={"type": "object"}) is None


def test_what_only_xgrammar_may_know_is_left_to_the_engine_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_check, "has_xgrammar", lambda: True)
    assert verdict("auto", json=NAMES) is None
    assert "propertyNames" in (verdict("guidance", json=NAMES) or "")
    assert "uniqueItems" in (verdict("auto", json=UNIQUE) or ""), "neither holds the text to it"
    monkeypatch.setattr(grammar_check, "has_xgrammar", lambda: False)
    assert "propertyNames" in (verdict("auto", json=NAMES) or "")


def test_with_xgrammar_alone_only_what_it_drops_is_known_before():
    assert "uniqueItems: xgrammar does not hold" in (verdict("xgrammar", json=UNIQUE) or "")
    assert verdict("xgrammar", regex="([") is None, "the engine says so"


def test_a_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch):
    asked = []
    checker = GrammarChecker(StructuredOutputsConfig())
    monkeypatch.setattr(grammar_check, "beyond_xgrammar", lambda spec: asked.append(spec) or "something")
    for _ in range(3):
        checker.check(StructuredOutputsParams(regex="ab"))
    assert len(asked) == 1


def test_the_check_imports_neither_torch_nor_numpy():
    code = (
        "import sys\n"
        "from vllm_clone.config import StructuredOutputsConfig\n"
        "from vllm_clone.engine.grammar_check import GrammarChecker\n"
        "from vllm_clone.sampling_params import StructuredOutputsParams\n"
        "GrammarChecker(StructuredOutputsConfig()).check(StructuredOutputsParams(regex='a'))\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'xgrammar') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_without_a_tokenizer_there_are_no_structured_outputs():
    processor = InputProcessor(fake_config(), None)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="--skip-tokenizer-init"):
        processor.check_grammar(params)


def test_the_end_of_a_chain_of_thought_travels_with_every_sequence():
    processor = InputProcessor(fake_config(), byte_tokenizer())
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), n=2)
    made = processor.process("r", "x", params, grammar_begins_after=[60, 47])
    assert [sequence.grammar_begins_after for sequence in made.sequences] == [[60, 47]] * 2


def test_structured_outputs_of_another_type_are_refused():
    with pytest.raises(RequestError, match="structured_outputs must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
