"""`emu plan --beside aiconfigurator`: its answer beside ours, and why the two differ."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import emu
from emu.apps.plan import beside
from emu.apps.plan.words import lines_of
from emu.errors import InputError

GIVEN: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": ["H100=2.5", "MI300X=3"],
    "rate": 20,
    "prompt_tokens": 700,
    "output_tokens": 30,
    "requests": 60,
    "ttft_p95": "500ms",
    "tpot_p95": "40ms",
    "tensor_parallel": [1],
    "draws": 0,
    "seeds": 1,
    "jobs": 1,
    "beside": "aiconfigurator",
}
AGG: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "cp": 1,
    "moe_ep": 1,
    "parallel": "tp1pp1",
    "backend": "vllm",
    "version": "0.24.0",
    "ttft": 117.2,
    "tpot": 27.0,
    "replicas_needed": 2,
    "total_gpus_needed": 2,
}
SPLIT: dict[str, Any] = {
    **{f"({role}){key}": 1 for role in "pd" for key in ("tp", "pp", "dp", "moe_ep", "workers")},
    "(p)bs": 1,
    "(d)bs": 60,
    "(p)backend": "vllm",
    "(p)version": "0.24.0",
    "(p)parallel": "tp1",
    "(d)parallel": "tp1",
    "ttft": 62.2,
    "tpot": 12.0,
    "replicas_needed": 1,
    "total_gpus_needed": 2,
}


class Rows:
    """A table of its."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows

    def to_dict(self, how: str) -> list[dict[str, Any]]:
        """As pandas gives them."""
        assert how == "records"
        return list(self.rows)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for the tool: `answer` is what it says, `asked` what it was asked."""
    fake = types.SimpleNamespace(answer={"agg": Rows(AGG)}, asked={})

    def cli_recommend(model: str, system: str, **asked: Any) -> Any:
        print("progress that is not shown")
        fake.asked = {"model": model, "system": system, **asked}
        if isinstance(fake.answer, Exception):
            raise fake.answer
        return types.SimpleNamespace(best_configs=fake.answer)

    for name in ("aiconfigurator", "aiconfigurator.cli", "aiconfigurator.cli.api"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["aiconfigurator.cli"].__dict__["api"] = types.SimpleNamespace(
        cli_recommend=cli_recommend
    )
    monkeypatch.setattr(beside, "database_name", lambda name: name)
    return fake


def test_its_cluster_is_run_here(
    tool: types.SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = emu.plan(**GIVEN, output=tmp_path)
    assert "progress" not in capsys.readouterr().out
    assert tool.asked == {
        "model": "meta-llama/Llama-3.1-8B",
        "system": "h100_sxm",
        "backend": "vllm",
        "target_request_rate": 20.0,
        "isl": 700,
        "osl": 30,
        "ttft": 500.0,
        "tpot": 40.0,
    }
    first, second = answer.beside
    assert first.label == "2 x H100-SXM5-80GB: 2 colocated, TP 1"
    assert (first.gpus, first.cost_per_h, first.ttft_ms, first.is_met) == (2, 5.0, 117.2, True)
    assert second.problem == "it has no data of MI300X"
    told = "\n".join(lines_of(answer))
    assert "beside, aiconfigurator, vllm 0.24.0: 2 x H100-SXM5-80GB: 2 colocated, TP 1" in told
    assert "run here with random arrivals: TTFT p95" in told
    page = (tmp_path / "report.html").read_text()
    assert "Second opinion" in page
    assert "2 colocated, TP 1, 5.00 $/h; TTFT 117.2 ms" in page


def test_passes_of_both_stand_beside_each_other(
    tool: types.SimpleNamespace, tmp_path: Path
) -> None:
    tool.answer = {"disagg": Rows(SPLIT), "agg": Rows({**AGG, "total_gpus_needed": 4})}
    (first, _) = emu.plan(**GIVEN, output=tmp_path).beside
    assert first.label == "2 x H100-SXM5-80GB: 1P+1D, TP 1"
    assert first.why[0].startswith("a prompt of 700 tokens takes 62.20 ms there, ")
    assert first.why[1].startswith("a step of 60 requests 12.00 ms there, ")
    assert "run here" in first.why[2]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (RuntimeError("no data\nof that"), "RuntimeError: no data"),
        ({"agg": Rows()}, "it finds no cluster"),
        ({"agg": Rows({**AGG, "dp": 2})}, "2 x H100-SXM5-80GB: 2 of tp1pp1"),
        ({"disagg": Rows({**SPLIT, "(d)tp": 2})}, "1P tp1, 1D tp1"),
        ({"agg": Rows({**AGG, "tp": 64})}, "here it cannot start: 32 attention heads"),
    ],
)
def test_what_cannot_be_run_is_told(
    answer: Any, told: str, tool: types.SimpleNamespace, tmp_path: Path
) -> None:
    tool.answer = answer
    found = emu.plan(**GIVEN, output=tmp_path)
    assert told in "\n".join(lines_of(found))
    assert found.beside[0].is_met is None


def test_a_tool_that_is_not_there_is_a_line_how_to_install_it(tmp_path: Path) -> None:
    given = {**GIVEN, "beside": "aicc"}
    with pytest.raises(InputError, match="--beside: unknown 'aicc'; there is aiconfigurator"):
        emu.plan(**given, output=tmp_path)


def test_a_tool_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emu.apps.plan.beside.find_spec", lambda name: None)
    with pytest.raises(InputError, match="is not installed: pip install aiconfigurator"):
        emu.plan(**GIVEN, output=tmp_path)
