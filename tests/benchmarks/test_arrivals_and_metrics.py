"""When requests leave, and the figures that outcomes give."""

import numpy as np
import pytest

from vllm_clone.benchmarks.serve.arrivals import RampUp, schedule
from vllm_clone.benchmarks.serve.metrics import figures_of
from vllm_clone.benchmarks.serve.sample import Outcome

INFINITE = float("inf")


def test_an_infinite_rate_sends_all_at_once():
    assert schedule(3, INFINITE, 1.0, None, 0).due == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, INFINITE])
def test_the_last_request_of_a_constant_rate_leaves_on_time(burstiness):
    due = schedule(1000, 20.0, burstiness, None, 1).due
    assert due[-1] == pytest.approx(50.0)
    assert sorted(due) == due


def test_gaps_spread_as_the_gamma_distribution_says():
    for burstiness in (0.5, 1.0, 4.0):
        gaps = np.diff(schedule(20000, 10.0, burstiness, None, 3).due)
        assert gaps.mean() == pytest.approx(0.1, rel=0.03)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_a_metronome():
    np.testing.assert_allclose(np.diff(schedule(10, 4.0, INFINITE, None, 0).due), 0.25)


def test_a_ramp_up_goes_from_start_to_end():
    linear = schedule(5, INFINITE, INFINITE, RampUp("linear", 2, 6), 0)
    assert linear.rates == [2, 3, 4, 5, 6]
    assert linear.due == pytest.approx(np.cumsum([1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]))
    assert schedule(3, INFINITE, 1.0, RampUp("exponential", 1, 16), 0).rates == pytest.approx([1, 4, 16])


def outcome(start: float, ttft: float, gaps: list[float], queue: float = 0.0) -> Outcome:
    latency = ttft + sum(gaps)
    return Outcome(10, start, ttft, gaps, latency, len(gaps) + 1, queue, success=True)


def test_figures_by_hand():
    done = [outcome(100.0, 0.2, [0.1, 0.3], queue=0.05), outcome(101.5, 0.4, []), Outcome(10, error="x")]
    f = figures_of(done, 2.0, metrics=list("x"), percentiles=[50.0], goodput={"ttft": 300.0})
    assert (f.completed, f.failed, f.input_tokens, f.output_tokens) == (2, 1, 20, 4)
    assert (f.per_second(f.output_tokens), f.goodput, f.spreads) == (2.0, 0.5, {})
    assert (f.peak_output_rate, f.peak_concurrency) == (3.0, 1)


def test_latencies_by_hand():
    done = [outcome(0.0, 0.2, [0.1, 0.3], queue=0.05), outcome(0.5, 0.4, [])]
    names = ["e2el_including_client_queue", "tpot", "ttft", "itl"]
    f = figures_of(done, 1.0, metrics=names, percentiles=[0.0, 99.9])
    assert list(f.spreads) == ["ttft", "tpot", "itl", "e2el_including_client_queue"]
    ttft = f.spreads["ttft"]
    assert (ttft.mean, ttft.median, ttft.std) == pytest.approx((300, 300, 100))
    assert dict(ttft.percentiles) == pytest.approx({0.0: 200, 99.9: 399.8})
    assert f.spreads["tpot"].mean == pytest.approx(200)  # the request of one token has none
    assert f.spreads["itl"].mean == pytest.approx(200)
    assert f.spreads["e2el_including_client_queue"].mean == pytest.approx((650 + 400) / 2)


def test_goodput_counts_requests_within_every_limit():
    done = [outcome(0, 0.1, [0.1]), outcome(0, 0.1, [0.3]), outcome(0, 0.5, [0.1]), outcome(0, 0.1, [])]
    f = figures_of(done, 1.0, metrics=[], percentiles=[], goodput={"ttft": 100.0, "tpot": 100.001})
    assert f.goodput == 2.0


def test_a_request_counts_in_every_second_it_touches():
    done = [outcome(0.0, 0.5, [2.0]), outcome(0.9, 0.2, []), outcome(2.1, 0.1, [])]
    f = figures_of(done, 3.0, metrics=[], percentiles=[])
    assert f.peak_concurrency == 2
    assert f.peak_output_rate == 2.0


def test_no_outcome_gives_zeros():
    f = figures_of([], 0.0, metrics=["ttft"], percentiles=[99.0])
    assert (f.per_second(5), f.peak_concurrency, f.spreads["ttft"].mean) == (0.0, 0, 0.0)
