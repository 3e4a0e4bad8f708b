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


def test_a_first_token_counts_when_it_comes_not_when_its_request_ends() -> None:
    books = Books()
    one = request(0, 1)
    books.arrived(one, S)
    end(one, 0.5, 1.0)
    assert books.ttft_ms(50, 2 * S, 1) == 500
    books.over(one, one.last_token_ns)
    assert books.ttft_ms(50, 2 * S, 1) == 500


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
