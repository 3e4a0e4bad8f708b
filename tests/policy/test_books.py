"""Windows over arrivals and ends, against figures that are counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emu.policy.books import Books, extrapolated
from emu.request import Request, Status

S = 1_000_000_000


def request(row: int, arrival_s: float, prompt: int = 100) -> Request:
    made = Request(
        request_id=row,
        arrival_ns=round(arrival_s * S),
        prompt_tokens=prompt,
        output_tokens=10,
        max_output_tokens=10,
    )
    made.row = row
    return made


def end(one: Request, ttft_s: float, tpot_s: float, tokens: int = 11) -> int:
    one.status = Status.COMPLETED
    one.generated_tokens = tokens
    one.first_token_ns = one.arrival_ns + round(ttft_s * S)
    one.last_token_ns = one.first_token_ns + round(tpot_s * S) * (tokens - 1)
    return one.last_token_ns


def test_rates_count_what_the_window_holds() -> None:
    books = Books()
    for second in range(10):
        books.arrived(request(second, second, prompt=10 * second), second * S)
    found = books.rates(9 * S, 4)  # (5 s, 9 s]: 6, 7, 8, 9
    assert found.arrivals_per_s == 1.0
    assert found.prompt_tokens_per_s == (60 + 70 + 80 + 90) / 4
    assert found.mean_prompt_tokens == 75
    assert books.rates(9 * S, 100).arrivals_per_s == 0.1


def test_figures_of_the_past_do_not_change_when_more_comes() -> None:
    rng = np.random.default_rng(7)
    books, seen = Books((500, 50, 0)), []
    live: list[tuple[int, Request]] = []
    for row in range(400):
        now_ns = row * S // 10
        for end_ns, one in [pair for pair in live if pair[0] <= now_ns]:
            books.over(one, end_ns)
        live = [pair for pair in live if pair[0] > now_ns]
        one = request(row, row / 10)
        books.arrived(one, now_ns)
        live.append((end(one, rng.exponential(0.4), rng.exponential(0.05)), one))
        live.sort(key=lambda pair: (pair[0], pair[1].row))
        seen.append((now_ns, books.rates(now_ns, 5), books.itl_ms(95, now_ns, 5)))
    for now_ns, rates, itl in seen:
        assert books.rates(now_ns, 5) == rates
        assert books.itl_ms(95, now_ns, 5) == itl


def test_percentiles_and_attainment_are_those_of_the_requests() -> None:
    books = Books((500, 50, 0))
    for row in range(100):
        one = request(row, 0)
        books.arrived(one, 0)
        end(one, (row + 1) / 100, 0.04 if row % 2 else 0.06)
        books.over(one, 3 * S)
    assert books.ttft_ms(95, 3 * S, 10) == 950
    assert books.ttft_ms(50, 3 * S, 10) == 500
    assert books.itl_ms(50, 3 * S, 10) == 40
    assert books.itl_ms(51, 3 * S, 10) == 60
    assert books.attainment(3 * S, 10) == 25 / 100
    assert books.ttft_ms(95, 3 * S, 1) is None  # the window has no first token


def nearest(figures: list[int], percent: float) -> float | None:
    """The least figure that so many per cent do not exceed, in ms, by going through all."""
    for figure in sorted(figures):
        if 100 * sum(other <= figure for other in figures) >= percent * len(figures):
            return figure / 1e6
    return None


@pytest.mark.parametrize("seed", range(20))
def test_every_figure_of_a_window_is_that_of_a_recount(seed: int) -> None:
    """Instants are whole seconds, so that many lie on the edge of a window."""
    rng = np.random.default_rng(seed)
    books = Books((2_000, 300, 6_000))
    arrived: list[Request] = []
    ended: list[tuple[int, Request]] = []
    for row, arrival_s in enumerate(sorted(rng.integers(0, 20, 40).tolist())):
        one = request(row, arrival_s, prompt=int(rng.integers(1, 100)))
        arrived.append(one)
        tokens = int(rng.choice((0, 1, 2, 12)))
        if tokens:
            end(one, int(rng.integers(0, 4)), float(rng.choice((0.1, 0.3, 0.5))), tokens)
        one.generated_tokens = tokens
        last_ns = max(one.arrival_ns, one.last_token_ns)
        end_ns = last_ns + S - 1 - (last_ns - 1) % S  # a whole second
        kinds = (Status.CANCELLED, Status.REJECTED, Status.FAILED)
        is_done = tokens and rng.random() < 0.7
        one.status = Status.COMPLETED if is_done else kinds[int(rng.integers(3))]
        ended.append((end_ns, one))
    ended.sort(key=lambda pair: pair[0])
    happens = [(one.arrival_ns, 0, one) for one in arrived]
    happens += [(end_ns, 1, one) for end_ns, one in ended]
    for at_ns, is_end, one in sorted(happens, key=lambda h: (h[0], h[1], h[2].row)):
        if is_end:
            books.over(one, at_ns)
        else:
            books.arrived(one, at_ns)
    for now_s, window_s in ((5, 5), (8, 3), (14, 6), (60, 60), (0, 1)):
        since, now_ns = (now_s - window_s) * S, now_s * S
        came = [one.prompt_tokens for one in arrived if since < one.arrival_ns <= now_ns]
        went = [one for end_ns, one in ended if since < end_ns <= now_ns]
        done = [one for one in went if one.status is Status.COMPLETED]
        out = sum(one.generated_tokens for one in done)
        rates = books.rates(now_ns, window_s)
        assert rates.arrivals_per_s == len(came) / window_s
        assert rates.prompt_tokens_per_s == sum(came) / window_s
        assert rates.mean_prompt_tokens == (sum(came) / len(came) if came else 0)
        assert rates.completions_per_s == len(done) / window_s
        assert rates.output_tokens_per_s == out / window_s
        assert rates.mean_output_tokens == (out / len(done) if done else 0)
        refused = sum(one.status is Status.REJECTED for one in went)
        assert rates.rejections_per_s == refused / window_s
        firsts = [
            one.first_token_ns - one.arrival_ns
            for one in arrived
            if one.generated_tokens and since < one.first_token_ns <= now_ns
        ]
        gaps = [
            (one.last_token_ns - one.first_token_ns) // (one.generated_tokens - 1)
            for one in done
            for _ in range(one.generated_tokens - 1)
        ]
        for percent in (0, 1, 33, 50, 90, 91, 100):
            assert books.ttft_ms(percent, now_ns, window_s) == nearest(firsts, percent)
            assert books.itl_ms(percent, now_ns, window_s) == nearest(gaps, percent)
        met = [
            one.status is Status.COMPLETED
            and one.first_token_ns - one.arrival_ns <= 2 * S
            and one.last_token_ns - one.first_token_ns <= 0.3 * S * (one.generated_tokens - 1)
            and end_ns - one.arrival_ns <= 6 * S
            for end_ns, one in ended
            if since < end_ns <= now_ns and one.status is not Status.CANCELLED
        ]
        assert books.attainment(now_ns, window_s) == (sum(met) / len(met) if met else None)


def test_a_mean_gap_counts_for_as_many_gaps_as_its_request_has() -> None:
    """Ten gaps of 10 ms and one of 100: nine tenths of eleven is the tenth."""
    books = Books()
    for row, (tpot_s, tokens) in enumerate(((0.01, 11), (0.1, 2), (0.5, 1))):
        one = request(row, 0)
        books.arrived(one, 0)
        end(one, 0.5, tpot_s, tokens)
        books.over(one, S)
    assert [books.itl_ms(percent, S, 2) for percent in (0, 90, 91, 100)] == [10, 10, 100, 100]


def test_an_objective_of_ttft_grows_with_the_prompt() -> None:
    """500 ms and 2 ms a token: 700 ms at 100 tokens; or the fixed one where that is longer."""
    for fixed_ms, ttft_s, is_met in ((0, 0.7, True), (0, 0.701, False), (800, 0.8, True)):
        books = Books((fixed_ms, 0, 0), (500, 2))
        one = request(0, 0)
        books.arrived(one, 0)
        end(one, ttft_s, 0.01)
        assert books.over(one, S).is_met is is_met


def test_a_first_token_counts_when_it_comes_not_when_its_request_ends() -> None:
    books = Books()
    one = request(0, 1)
    books.arrived(one, S)
    end(one, 0.5, 1.0)
    assert books.ttft_ms(50, 2 * S, 1) == 500
    books.over(one, one.last_token_ns)
    assert books.ttft_ms(50, 2 * S, 1) == 500


def test_double_smoothing_is_worked_out_by_hand() -> None:
    """4, 6, 10: level 6, trend 2; then level 0.5 x 10 + 0.5 x 8 = 9 and trend 0.3 x 3 + 0.7 x 2."""
    assert extrapolated((4, 6, 10), 1, "holt") == pytest.approx(9 + 2.3)
    assert extrapolated((4, 6, 10), 2, "linear") == pytest.approx(20 / 3 + 3 * 3)
    assert extrapolated((4, 6, 10), 2, "last") == 10
    assert extrapolated((4,), 2, "holt") == 4
    assert extrapolated((), 2, "linear") == 0


def test_a_forecast_takes_as_many_windows_as_have_passed() -> None:
    """1, 2 and 3 arrivals in the seconds (0, 1], (1, 2] and (2, 3], with longer prompts each."""
    books = Books()
    row = 0
    for second in (1, 2, 3):
        for _ in range(second):
            books.arrived(request(row, second, prompt=100 * second), second * S)
            row += 1
    found = books.forecast(3 * S, 2, 1, 3, "linear")
    assert found.arrivals_per_s == pytest.approx(5)
    assert found.prompt_tokens_per_s == pytest.approx(5 * 300)
    assert found.mean_prompt_tokens == 300
    late = books.forecast(4 * S, 1, 1, 2, "last")
    assert (late.arrivals_per_s, late.mean_prompt_tokens) == (0, 300)
    # The window that ends at 0 had nothing, and none ends before.
    early = books.forecast(S, 1, 1, 9, "linear")
    assert early.arrivals_per_s == pytest.approx(2)


@pytest.mark.parametrize("method", ["linear", "holt"])
def test_a_straight_line_is_forecast_exactly(method: str) -> None:
    line = [3.0 + 2.0 * index for index in range(8)]
    found = extrapolated(line, 2.0, method)  # type: ignore[arg-type]
    assert math.isclose(found, 3.0 + 2.0 * 9)


def test_a_forecast_is_never_negative() -> None:
    books = Books()
    for row in range(50):
        books.arrived(request(row, row / 10), row * S // 10)
    assert books.forecast(8 * S, 60, 1, 6, "linear").arrivals_per_s == 0
