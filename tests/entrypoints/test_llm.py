"""LLM: from Python to a real (tiny, random) model and back."""

import json
from pathlib import Path

import pytest

from tests.engine.fakes import byte_tokenizer
from vllm_clone import LLM, SamplingParams
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama over bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("bytes-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer()._backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(model=str(checkpoint), dtype="float32", kv_cache_memory_bytes=4 << 20, max_num_seqs=8)


def text_of(output) -> str:
    return output.outputs[0].text


def test_greedy_tokens_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = list(b"Once upon a time")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_outputs_come_in_the_order_of_the_prompts_whatever_their_length(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * i) % 13, ignore_eos=True) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    alone = [text_of(llm.generate(p, q, use_tqdm=False)[0]) for p, q in zip(prompts, params, strict=True)]
    assert [text_of(o) for o in outputs] == alone


@pytest.mark.parametrize(
    "prompt", ["Hi", list(b"Hi"), {"prompt": "Hi"}, {"prompt_token_ids": list(b"Hi")}, TokensPrompt(list(b"Hi"))]
)
def test_a_prompt_may_be_text_or_token_ids(llm: LLM, prompt) -> None:
    (one,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    (among,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == list(b"Hi")
    assert text_of(one) == text_of(among)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_seed_repeats_an_answer_and_n_gives_several(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("Hi", params, use_tqdm=False)[0] for _ in range(2))
    texts = [c.token_ids for c in first.outputs]
    assert texts == [c.token_ids for c in second.outputs]
    assert len({tuple(t) for t in texts}) == 3


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len({tuple(o.outputs[0].token_ids) for o in llm.generate(["Hi"] * 4, params, use_tqdm=False)}) == 4


def test_logprobs_are_those_of_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    choice = output.outputs[0]
    for token, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(entries) == 3
        assert next(iter(entries)) == token
        assert entries[token].rank == 1
        assert entries[token].logprob == max(e.logprob for e in entries.values())
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in output.prompt_logprobs[1:]] == list(b"ello")


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "<user>Hi<assistant>"
    (plain,) = llm.generate("<user>Hi<assistant>", GREEDY, use_tqdm=False)
    assert text_of(output) == text_of(plain)
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2


def test_one_invalid_prompt_raises_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate(["fine", [999]], GREEDY, use_tqdm=False)
    assert len(llm.generate(["fine"], GREEDY, use_tqdm=False)) == 1
    assert llm.llm_engine.core.get_state()["running"] == 0


def test_default_parameters_are_used_when_none_are_given(llm: LLM) -> None:
    (output,) = llm.generate("Hi", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    assert llm.get_default_sampling_params().max_tokens == 16


def test_the_progress_bar_tells_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    error = capsys.readouterr().err
    assert "Processed prompts: 100%" in error
    assert "tok/s" in error


def test_prefix_reuse_changes_no_answer(llm: LLM) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 2
    assert llm.reset_prefix_cache()
    cold, warm = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == 64
    assert text_of(cold) == text_of(warm)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="max_modle_len"):
        LLM(model="x", max_modle_len=5)


def test_the_number_of_parameters_must_match(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)
