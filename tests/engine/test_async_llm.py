"""What a consumer of AsyncLLM can rely on, whether the engine is a thread or a process."""

import asyncio
import itertools
import os

import msgspec
import pytest

from tests.engine.conftest import Engine, in_child, in_process, run
from tests.engine.fakes import (
    CRASH,
    ENDS,
    HANG,
    FakeExecutor,
    byte_tokenizer,
    expected_ids,
    expected_text,
    fake_config,
    with_scheduler,
)
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.core_client import ThreadClient
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.errors import EngineDeadError, RequestError
from vllm_clone.sampling_params import RequestOutputKind, SamplingParams

DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
PACED = {"step_seconds": 0.005}


async def collect(engine, prompt, params, request_id="r", **kwargs):
    return [output async for output in engine.generate(prompt, params, request_id, **kwargs)]


async def until_idle(engine):
    """Return once the engine holds no request and no block."""
    while True:
        state = await engine.utility("get_state")
        if state["running"] == state["waiting"] == 0 and state["free_blocks"] == state["num_blocks"] - 1:
            return


def test_a_request_gets_its_tokens_and_text(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            outputs = await collect(engine, "hello", SamplingParams(max_tokens=30, output_kind=FINAL))
            (output,) = outputs
            assert output.finished
            assert output.request_id == "r"
            assert output.prompt == "hello"
            (choice,) = output.outputs
            assert choice.text == expected_text("hello", 30)
            assert choice.token_ids == expected_ids(list(b"hello"), 30)
            assert (choice.finish_reason, choice.stop_reason) == ("length", None)

    run(main)


def test_a_length_that_the_engine_lowers_holds_in_front_too(engine_of: Engine) -> None:
    async def main():
        config = fake_config(num_blocks=5)
        config.model_config.fit_max_model_len = True
        async with engine_of(config) as engine:
            assert engine.vllm_config.model_config.max_model_len == 4 * 16
            with pytest.raises(RequestError, match="64"):
                await collect(engine, "x" * 65, SamplingParams(max_tokens=1))

    run(main)


def test_deltas_add_up_to_the_whole(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            outputs = await collect(engine, "x", SamplingParams(max_tokens=40, output_kind=DELTA))
            assert "".join(o.outputs[0].text for o in outputs) == expected_text("x", 40)
            assert [i for o in outputs for i in o.outputs[0].token_ids] == expected_ids(list(b"x"), 40)
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]

    run(main)


def test_cumulative_outputs_only_grow(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            outputs = await collect(engine, "x", SamplingParams(max_tokens=20, output_kind=CUMULATIVE))
            texts = [o.outputs[0].text for o in outputs]
            assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
            assert texts[-1] == expected_text("x", 20)

    run(main)


def test_many_requests_at_once_each_get_their_own(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            prompts = [f"{i}-{chr(97 + i % 26)}" for i in range(100)]
            params = SamplingParams(max_tokens=25, output_kind=DELTA)
            answers = await asyncio.gather(*(collect(engine, p, params, p) for p in prompts))
            for prompt, outputs in zip(prompts, answers, strict=True):
                assert "".join(o.outputs[0].text for o in outputs) == expected_text(prompt, 25)
            await until_idle(engine)

    run(main)


def test_eos_ends_a_request_and_its_text_is_not_shown(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            (output,) = await collect(
                engine, TokensPrompt([ENDS, 97]), SamplingParams(max_tokens=30, output_kind=FINAL)
            )
            (choice,) = output.outputs
            assert choice.text == "bcde"
            assert choice.token_ids == [98, 99, 100, 101, 256]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", None)

    run(main)


def test_a_stop_string_ends_the_request_in_the_engine_too(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            params = SamplingParams(max_tokens=4000, stop=["hij"], output_kind=DELTA)
            outputs = await collect(engine, "a", params)
            assert "".join(o.outputs[0].text for o in outputs) == "bcdefg"
            assert outputs[-1].outputs[0].finish_reason == "stop"
            assert outputs[-1].outputs[0].stop_reason == "hij"
            await until_idle(engine)

    run(main)


def test_closing_the_generator_frees_the_request(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            stream = engine.generate("a", SamplingParams(max_tokens=4000, output_kind=DELTA), "r")
            await anext(stream)
            await stream.aclose()
            assert engine.output_processor.num_requests == 0
            await until_idle(engine)

    run(main)


def test_cancelling_the_consumer_frees_the_request(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            params = SamplingParams(n=3, max_tokens=4000, output_kind=FINAL)
            task = asyncio.create_task(collect(engine, "a", params))
            while engine.output_processor.num_requests == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_idle(engine)

    run(main)


def test_abort_by_id_gives_a_last_output(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            stream = engine.generate("a", SamplingParams(n=2, max_tokens=4000, output_kind=DELTA), "r")
            await anext(stream)
            await engine.abort("r")
            rest = [output async for output in stream]
            assert rest[-1].finished
            assert {c.finish_reason for c in rest[-1].outputs} == {"abort"}
            await until_idle(engine)

    run(main)


def test_n_choices_come_together_at_the_end(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            (output,) = await collect(engine, "a", SamplingParams(n=3, max_tokens=5, output_kind=FINAL))
            assert [c.index for c in output.outputs] == [0, 1, 2]
            assert {c.text for c in output.outputs} == {"bcdef"}
            assert output.finished

    run(main)


def test_n_choices_stream_under_their_index(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            outputs = await collect(engine, "a", SamplingParams(n=3, max_tokens=5, output_kind=DELTA))
            for index in range(3):
                parts = [c for o in outputs for c in o.outputs if c.index == index]
                assert "".join(c.text for c in parts) == "bcdef"
                assert parts[-1].finish_reason == "length"
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]

    run(main)


def test_a_slow_consumer_gets_everything_in_one_piece(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            stream = engine.generate("a", SamplingParams(max_tokens=500, logprobs=1, output_kind=DELTA), "slow")
            first = await anext(stream)
            await collect(engine, "b", SamplingParams(max_tokens=600, output_kind=FINAL), "quick")
            rest = [output async for output in stream]
            assert len(rest) <= 1  # none when everything had come before the first look
            parts = [output.outputs[0] for output in (first, *rest)]
            assert parts[-1].finish_reason == "length"
            assert "".join(p.text for p in parts) == expected_text("a", 500)
            assert sum(len(p.logprobs) for p in parts) == 500

    run(main)


def test_logprobs_carry_token_texts(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=0, output_kind=FINAL)
            (output,) = await collect(engine, "xa", params)
            first = output.outputs[0].logprobs[0]
            assert [(t, p.decoded_token, p.rank) for t, p in first.items()] == [(98, "b", 1), (99, "c", 2)]
            assert output.prompt_logprobs[0] is None
            assert [(t, p.decoded_token, p.rank) for t, p in output.prompt_logprobs[1].items()] == [(97, "a", 3)]

    run(main)


def test_an_invalid_request_raises_and_harms_nobody(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await collect(engine, TokensPrompt([999]), SamplingParams())
            (output,) = await collect(engine, "a", SamplingParams(max_tokens=3, output_kind=FINAL))
            assert output.outputs[0].text == "bcd"

    run(main)


def test_a_value_that_cannot_travel_ends_only_its_request() -> None:
    async def main():
        async with in_child(fake_config()) as engine:
            with pytest.raises(RequestError, match="cannot be sent"):
                await collect(engine, "a", SamplingParams(extra_args={"x": object()}))
            (output,) = await collect(engine, "a", SamplingParams(max_tokens=3, output_kind=FINAL))
            assert output.outputs[0].text == "bcd"

    run(main)


def test_a_message_the_engine_cannot_decode_ends_only_its_request() -> None:
    async def main():
        async with in_child(fake_config()) as engine:
            params = SamplingParams(output_kind=FINAL)
            params.top_k = "many"  # type: ignore[assignment]
            request = await engine.prepare("a", SamplingParams(output_kind=FINAL), "r")
            request.sequences[0].sampling_params = params
            with pytest.raises(RequestError, match="cannot be decoded"):
                [o async for o in engine.stream(request)]
            (output,) = await collect(engine, "a", SamplingParams(max_tokens=3, output_kind=FINAL))
            assert output.outputs[0].text == "bcd"

    run(main)


def test_a_failing_utility_leaves_the_engine_alone(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            for call in (("no_such_thing",), ("ping", "too", "many"), ("__class__",)):
                with pytest.raises(RuntimeError):
                    await engine.utility(*call)
            assert await engine.utility("ping") is True
            assert await engine.utility("reset_prefix_cache") is True

    run(main)


def test_a_crashing_step_ends_every_open_request_with_the_cause(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            victims = [
                asyncio.create_task(collect(engine, "a", SamplingParams(max_tokens=4000), f"v{i}")) for i in range(4)
            ]
            while engine.output_processor.num_prefill_tokens or not engine.output_processor.num_requests:
                await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="the fake model crashed"):
                await collect(engine, TokensPrompt([CRASH]), SamplingParams())
            for victim in victims:
                with pytest.raises(EngineDeadError, match="the fake model crashed"):
                    await victim
            assert engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await collect(engine, "a", SamplingParams())
            with pytest.raises(EngineDeadError):
                await engine.utility("ping")
            assert "the fake model crashed" in str(await engine.wait_dead())

    run(main)


def test_a_hanging_step_is_unhealthy_until_it_goes_on(
    engine_of: Engine, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENGINE_HEALTH_TIMEOUT", "0.4")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def healthy(engine) -> bool:
        try:
            await engine.check_health()
        except EngineDeadError:
            return False
        return True

    async def main():
        async with engine_of(fake_config(fake={"fifo": str(fifo)})) as engine:
            assert await healthy(engine)
            stuck = asyncio.create_task(
                collect(engine, TokensPrompt([HANG]), SamplingParams(max_tokens=1, output_kind=FINAL))
            )
            async with asyncio.timeout(1.0):
                while await healthy(engine):
                    await asyncio.sleep(0.01)
            assert not engine.errored
            with fifo.open("wb"):
                pass
            (output,) = await stuck
            assert output.outputs[0].finish_reason == "length"
            async with asyncio.timeout(1.0):
                while not await healthy(engine):
                    await asyncio.sleep(0.01)

    run(main)


def test_shutdown_aborts_open_requests_with_an_answer(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            tasks = [
                asyncio.create_task(collect(engine, "a", SamplingParams(max_tokens=4000, output_kind=DELTA), f"r{i}"))
                for i in range(3)
            ]
            while engine.output_processor.num_prefill_tokens or not engine.output_processor.num_requests:
                await asyncio.sleep(0)
            await engine.shutdown()
            for task in tasks:
                outputs = await task
                assert outputs[-1].outputs[0].finish_reason == "abort"

    run(main)


def test_a_drain_lets_open_requests_finish_and_refuses_new_ones(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            task = asyncio.create_task(collect(engine, "a", SamplingParams(max_tokens=60, output_kind=FINAL)))
            while engine.output_processor.num_requests == 0:
                await asyncio.sleep(0)
            closing = asyncio.create_task(engine.shutdown(timeout=20))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shutting down"):
                await engine.check_health()
            with pytest.raises(RequestError, match="shutting down") as refused:
                await collect(engine, "b", SamplingParams())
            assert refused.value.kind == "overloaded"
            (output,) = await task
            assert output.outputs[0].finish_reason == "length"
            await closing

    run(main)


def test_a_drain_that_takes_too_long_is_cut(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            task = asyncio.create_task(collect(engine, "a", SamplingParams(max_tokens=4000, output_kind=FINAL)))
            while engine.output_processor.num_requests == 0:
                await asyncio.sleep(0)
            await engine.shutdown(timeout=0.2)
            (output,) = await task
            assert output.outputs[0].finish_reason == "abort"

    run(main, seconds=3)


def test_a_second_shutdown_cuts_a_drain_short(engine_of: Engine) -> None:
    async def main():
        async with engine_of(fake_config(fake=PACED)) as engine:
            task = asyncio.create_task(collect(engine, "a", SamplingParams(max_tokens=4000, output_kind=FINAL)))
            while engine.output_processor.num_requests == 0:
                await asyncio.sleep(0)
            slow = asyncio.create_task(engine.shutdown(timeout=60))
            await asyncio.sleep(0)
            await engine.shutdown()
            await slow
            (output,) = await task
            assert output.outputs[0].finish_reason == "abort"

    run(main, seconds=5)


def test_more_requests_than_allowed_are_refused() -> None:
    class Rejections:
        def __init__(self) -> None:
            self.reasons: list[str] = []

        def record(self, scheduler, iteration) -> None: ...

        def record_rejection(self, reason: str) -> None:
            self.reasons.append(reason)

    async def main():
        log = Rejections()
        config = with_scheduler(fake_config(fake=PACED), max_num_queued_reqs=1)
        async with in_process(config, stat_loggers=[log]) as engine:
            stream = engine.generate("a", SamplingParams(max_tokens=4000), "r")
            await anext(stream)
            with pytest.raises(RequestError, match="busy") as refused:
                await collect(engine, "b", SamplingParams(), "s")
            assert refused.value.kind == "overloaded"
            assert log.reasons == ["max_num_queued_reqs"]
            await stream.aclose()

    run(main)


def test_statistics_add_up() -> None:
    class Totals:
        def __init__(self) -> None:
            self.iterations = []
            self.states = []

        def record(self, scheduler, iteration) -> None:
            self.iterations.append(iteration)
            if scheduler is not None:
                self.states.append(scheduler)

        def record_rejection(self, reason: str) -> None: ...

    async def main():
        totals = Totals()
        async with in_process(fake_config(), stat_loggers=[totals]) as engine:
            await collect(engine, "a" * 10, SamplingParams(n=2, max_tokens=7, output_kind=FINAL))
            while not totals.states or totals.states[-1].num_running:
                await asyncio.sleep(0)
        assert sum(i.num_generation_tokens for i in totals.iterations) == 14
        assert sum(i.num_prompt_tokens for i in totals.iterations) == 20
        assert sum(len(i.time_to_first_token) for i in totals.iterations) == 2
        assert sum(len(i.inter_token_latency) for i in totals.iterations) == 12
        finished = [f for i in totals.iterations for f in i.finished]
        assert [f.num_generation_tokens for f in finished] == [7, 7]
        assert all(f.finish_reason == "length" and f.queued_time >= 0 and f.decode_time > 0 for f in finished)
        assert [n for i in totals.iterations for n in i.request_n] == [2]
        assert [n for i in totals.iterations for n in i.request_max_generation_tokens] == [7]

    run(main)


def test_a_failing_stat_logger_harms_no_request() -> None:
    class Broken:
        def record(self, scheduler, iteration) -> None:
            raise ZeroDivisionError

        def record_rejection(self, reason: str) -> None: ...

    async def main():
        async with in_process(fake_config(), stat_loggers=[Broken()]) as engine:
            for _ in range(2):
                (output,) = await collect(engine, "a", SamplingParams(max_tokens=3, output_kind=FINAL))
                assert output.outputs[0].text == "bcd"

    run(main)


def test_an_output_handler_that_fails_does_not_leave_requests_waiting(
    engine_of: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main():
        async with engine_of(fake_config()) as engine:
            monkeypatch.setattr(engine.output_processor, "process", lambda *args: 1 / 0)
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await collect(engine, "a", SamplingParams())
            assert engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()

    run(main)


def test_an_unreadable_message_from_the_engine_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main():
        async with in_child(fake_config(fake=PACED)) as engine:
            task = asyncio.create_task(collect(engine, "a", SamplingParams(max_tokens=4000)))
            while not engine.output_processor.num_requests:
                await asyncio.sleep(0)
            decoder = engine._client._process._decoder
            garbled = msgspec.msgpack.Decoder(int)
            engine._client._process._decoder = garbled
            with pytest.raises(EngineDeadError, match="could not be taken in"):
                await task
            engine._client._process._decoder = decoder

    run(main)


def test_a_request_before_the_engine_is_ready_is_refused() -> None:
    async def main():
        config = fake_config()
        engine = AsyncLLM(config, ThreadClient(config, FakeExecutor), byte_tokenizer())
        with pytest.raises(RequestError, match="starting") as refused:
            await collect(engine, "a", SamplingParams())
        assert refused.value.kind == "overloaded"

    run(main)
