"""What a slow consumer finds when it comes back."""

import asyncio

import pytest

from vllm_clone.engine.collector import Collector
from vllm_clone.outputs import CompletionOutput, RequestOutput


def output(text: str, index: int = 0, finish: str | None = None, **kwargs) -> RequestOutput:
    completion = CompletionOutput(index, text, [ord(c) for c in text], finish_reason=finish)
    return RequestOutput("r", None, [1], [completion], finish is not None, **kwargs)


def taken(collector: Collector) -> RequestOutput:
    return asyncio.run(collector.get())


def test_deltas_of_one_sequence_are_joined() -> None:
    collector = Collector(delta=True)
    for part in (output("ab"), output("c"), output("d", finish="stop")):
        collector.put(part)
    joined = taken(collector)
    assert joined.finished
    assert joined.outputs == [CompletionOutput(0, "abcd", [97, 98, 99, 100], finish_reason="stop")]


def test_whole_outputs_replace_each_other() -> None:
    collector = Collector(delta=False)
    collector.put(output("a"))
    collector.put(output("ab"))
    assert taken(collector).outputs[0].text == "ab"


@pytest.mark.parametrize("delta", [True, False])
def test_sequences_sit_side_by_side(delta: bool) -> None:
    collector = Collector(delta)
    collector.put(output("b", index=1))
    collector.put(output("a", index=0))
    assert [(c.index, c.text) for c in taken(collector).outputs] == [(0, "a"), (1, "b")]


def test_prompt_scores_survive_a_merge() -> None:
    collector = Collector(delta=True)
    collector.put(output("a", prompt_logprobs=[None]))
    collector.put(output("b"))
    assert taken(collector).prompt_logprobs == [None]


def test_an_exception_replaces_what_is_pending() -> None:
    collector = Collector(delta=True)
    collector.put(output("a"))
    collector.put(RuntimeError("gone"))
    collector.put(output("b"))
    with pytest.raises(RuntimeError, match="gone"):
        taken(collector)


def test_a_waiting_consumer_is_woken() -> None:
    async def main() -> str:
        collector = Collector(delta=True)
        waiting = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        collector.put(output("a"))
        return (await waiting).outputs[0].text

    assert asyncio.run(main()) == "a"
