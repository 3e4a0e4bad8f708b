"""Point tables: rows that are read, rows that are left out with a reason, samples and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emu.apps.fidelity.command import fidelity_command
from emu.apps.fidelity.options import FidelityOptions
from emu.apps.fidelity.points.board import (
    TAKEN_AS_DRAFTED,
    PointBoard,
    groups_of,
    point_board,
)
from emu.apps.fidelity.points.cases import TOKEN, Job, configuration, emulate, mean_of_rounds
from emu.apps.fidelity.points.doubt import (
    COLD,
    CONTRADICTS,
    FEW_SEATS,
    OFTEN_COLD,
    doubted,
)
from emu.apps.fidelity.points.recipes import recipe_of
from emu.apps.fidelity.points.refit import relative
from emu.apps.fidelity.points.table import read_points, sampled, tables_below
from emu.cli import main
from emu.config.load import config_from_text
from emu.errors import InputError
from tests.shared_data import SHARED, needs_shared

HEADER = (
    "id,note,source,model,precision,gpu,gpus,engine,version,mode,tp,pp,ep,moe_tp,dp,p_workers,p_tp,p_pp,p_dp,"
    "p_ep,d_workers,d_tp,d_pp,d_dp,d_ep,spec,isl,osl,load_kind,load_value,measured_on,ttft_ms,tpot_ms"
)
COLUMNS = HEADER.split(",")
ROW = {
    "id": "a",
    "source": "inferencex-test",
    "model": "Qwen/Qwen3-32B",
    "precision": "fp8",
    "gpu": "H100-SXM",
    "gpus": "2",
    "engine": "vllm",
    "version": "0.19.0",
    "mode": "aggregated",
    "tp": "2",
    "spec": "none?",
    "isl": "256",
    "osl": "32",
    "load_kind": "closed_loop_concurrency",
    "load_value": "2",
    "ttft_ms": "50",
    "tpot_ms": "10",
}


def table(directory: Path, *rows: dict[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "points.csv"
    lines = [",".join((ROW | row).get(column, "") for column in COLUMNS) for row in rows]
    path.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")
    return path


def board_of(directory: Path) -> PointBoard:
    """Of all points below the directory."""
    return point_board(FidelityOptions(directory=directory, sample=0, jobs=1))


def test_a_row_becomes_a_configuration_with_the_published_conditions(tmp_path: Path) -> None:
    points, unread = read_points(table(tmp_path, {"precision": "fp8", "load_value": "7"}))
    assert unread == []
    config = config_from_text(configuration(Job(points[0])), "point")
    assert config.workload.concurrency == 7
    assert config.workload.synthetic is not None
    assert config.workload.synthetic.requests == 70
    lengths = config.workload.synthetic.prompt
    assert (lengths.min, lengths.max) == (204, 256)
    assert config.model.dtype == "fp8_block", "Qwen's own checkpoint of 8 bits"
    assert config.replicas[0].tensor_parallel == 2
    assert not config.scheduler.prefix_caching


def test_lengths_are_fixed_where_the_source_does_not_draw_them(tmp_path: Path) -> None:
    points, _ = read_points(table(tmp_path, {"source": "nvidia-aic-gap-analysis"}))
    assert points[0].least_share == 1.0


def test_the_template_of_a_chat_comes_on_top_of_the_stated_text(tmp_path: Path) -> None:
    row = {"source": "nvidia-aic-gap-analysis", "isl": "1000", "model": "Qwen/Qwen3-32B"}
    llama = row | {"id": "b", "model": "meta-llama/Llama-3.1-8B-Instruct"}
    points, _ = read_points(table(tmp_path, row, llama, {"id": "c"}))
    assert [point.template_tokens for point in points] == [8, 35, 0]
    assert "min = 1008\nmax = 1008" in configuration(Job(points[0]))
    # Limits are the configurator's, which knows the stated text alone.
    assert recipe_of(points[0]).scheduler["max_num_batched_tokens"] == 128 + 1000 + 1500


def test_a_configurators_servers_have_the_limits_that_it_generates(tmp_path: Path) -> None:
    row = {"source": "nvidia-aic-gap-analysis", "isl": "1024", "load_value": "8"}
    points, _ = read_points(
        table(tmp_path, row, row | {"engine": "trtllm"}, row | {"engine": "sglang", "version": ""})
    )
    assert recipe_of(points[0]).scheduler["max_num_batched_tokens"] == 128 + 1024 + 1500
    keys = recipe_of(points[1]).scheduler
    assert keys["max_num_tokens"] == 2656, "in whole blocks"
    assert not keys["enable_block_reuse"]
    assert recipe_of(points[2]).scheduler["chunked_prefill_size"] == -1
    assert recipe_of(points[2]).scheduler["cuda_graph_max_bs"] == 128, "as many as may run"
    for point in points:
        assert emulate(Job(point)).refused == ""


def test_rows_are_doubted_by_their_neighbors_alone(tmp_path: Path) -> None:
    """More work never makes the first token earlier; and what the tables' README lists."""
    rows = [{"load_value": str(n), "ttft_ms": str(ms)} for n, ms in ((2, 900), (4, 400), (8, 500))]
    listed = {"source": "nvidia-aic-gap-analysis", "gpu": "GB200", "engine": "trtllm"}
    points = doubted(read_points(table(tmp_path, *rows, listed, listed | {"gpu": "B200"}))[0])
    assert [one.doubt for one in points] == [COLD, "", "", CONTRADICTS, ""]
    lengths = [{"isl": "8"}, {"isl": "2048"}, {"osl": "512"}]
    others = [doubted(read_points(table(tmp_path, rows[0], rows[1] | one))[0]) for one in lengths]
    told = [[one.doubt for one in points] for points in others]
    assert told == [["", ""], [COLD, ""], ["", ""]], "shorter prompts, longer ones, other outputs"


def test_rows_that_wait_for_a_seat_longer_than_for_the_output_are_doubted(tmp_path: Path) -> None:
    waits = {"load_value": "512", "ttft_ms": "400", "tpot_ms": "10"}
    rows = [waits, waits | {"id": "b", "ttft_ms": "300"}, waits | {"id": "c", "engine": "sglang"}]
    points, _ = read_points(table(tmp_path, *rows))
    assert [point.doubt for point in doubted(points)] == [FEW_SEATS, "", ""]


def test_a_server_that_was_often_cold_is_doubted_in_all_its_rows(tmp_path: Path) -> None:
    def rows(cold: int) -> list[dict[str, str]]:
        firsts = [9000 - at for at in range(cold)] + [100 + at for at in range(9)]
        return [
            {"load_value": str(4 + at), "ttft_ms": str(first)} for at, first in enumerate(firsts)
        ]

    for cold, doubt in ((2, ""), (3, OFTEN_COLD)):
        points = doubted(read_points(table(tmp_path, *rows(cold)))[0])
        assert [one.doubt for one in points] == [COLD] * cold + [doubt] * 9


def test_a_run_of_many_clients_is_cut_and_its_ends_count_as_in_a_whole_one(tmp_path: Path) -> None:
    points, _ = read_points(table(tmp_path, *({"load_value": n} for n in ("400", "800", "8000"))))
    assert [Job(point).rounds for point in points] == [10, 5, 4]
    assert Job(points[0], is_trial=True).rounds == 3
    assert mean_of_rounds([10, 10, 2, 4, 8, 8], 2) == (10 + 8 * 3 + 8) / 10
    assert mean_of_rounds([40, 12, 2, 8], 1) == (40 + 12 + 2 * 7 + 8) / 10, "the convoy is over"
    assert mean_of_rounds([1, 2, 6], 0) == 3, "no clients: a plain mean"
    assert mean_of_rounds([20, *[1] * 9], 1) == 2.9, "a whole run"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"gpu": "GB200", "gpus": "36", "tp": "36"},
            "servers of a rack added up: how many of which kind is not known",
        ),
        ({"engine": "lmdeploy"}, "engine lmdeploy"),
        ({"gpus": ""}, "number of GPUs not known"),
        ({"gpus": "8"}, "8 GPUs, tp 2, pp 1"),
        ({"dp": "2"}, "attention data parallelism without whole experts on its ranks"),
        ({"gpu": "Gaudi4"}, "GPU Gaudi4"),
        ({"load_kind": "poisson_qps"}, "load poisson_qps"),
        ({"load_value": ""}, "load_value (not stated)"),
        ({"ttft_ms": ""}, "no mean latencies"),
        ({"tpot_ms": "fast"}, "tpot_ms 'fast'"),
        ({"isl": "10.5"}, "isl 10.5"),
        ({"isl": "0"}, "isl 0"),
        ({"load_value": "0"}, "load_value 0"),
        ({"osl": "1"}, "outputs of one token have no TPOT"),
        ({"ttft_ms": "-5"}, "ttft_ms '-5'"),
        ({"tpot_ms": "0"}, "tpot_ms '0'"),
        ({"ttft_ms": "inf"}, "ttft_ms 'inf'"),
        ({"tpot_ms": "nan"}, "no mean latencies"),
        ({"precision": "fp3"}, "precision fp3"),
    ],
)
def test_a_row_that_says_too_little_is_left_out_with_its_reason(
    tmp_path: Path, changed: dict[str, str], reason: str
) -> None:
    points, unread = read_points(table(tmp_path, changed))
    assert points == []
    assert [one.reason for one in unread] == [reason]


def test_a_name_is_of_one_row(tmp_path: Path) -> None:
    points, _ = read_points(table(tmp_path, {}, {"isl": "512"}))
    assert [(p.point_id, p.prompt_tokens) for p in points] == [("a", 256), ("a:3", 512)]
    table(tmp_path / "below", {"isl": "512"})
    with pytest.raises(InputError, match="id: 'a' is the name of a row of another table, too"):
        point_board(FidelityOptions(directory=tmp_path, jobs=1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fit": Path("x.toml")}, "--fit: is for measured runs; this is a table of points"),
        ({"leave_out": "run"}, "--leave-out: is for measured runs"),
        ({"learn": ["half"]}, "--learn: is for measured runs"),
        ({"only": ["zzz"]}, "no row has such a word in its name or model"),
    ],
)
def test_what_a_table_of_points_cannot_answer_is_told(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        fidelity_command(FidelityOptions(directory=table(tmp_path, {}), jobs=1, **options))


def test_a_spreadsheets_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    lines = table(tmp_path, {}).read_text(encoding="utf-8").splitlines()
    moved = [",".join([one.split(",")[2], *one.split(",")]) for one in lines]
    path = tmp_path / "points.csv"
    path.write_text("\n".join([*moved, ""]), encoding="utf-8-sig")
    assert [point.source for point in read_points(path)[0]] == ["inferencex-test"]


def test_prefill_and_decode_servers_are_read_apart(tmp_path: Path) -> None:
    row = {"mode": "disaggregated", "gpus": "6", "tp": "", "p_workers": "2", "p_tp": "1"}
    points, _ = read_points(table(tmp_path, row | {"d_workers": "1", "d_tp": "4"}))
    assert [(s.role, s.count, s.tensor_parallel) for s in points[0].servers] == [
        ("prefill", 2, 1),
        ("decode", 1, 4),
    ]
    assert points[0].gpus == 6


def test_rows_that_do_not_say_how_many_servers_there_were_are_left_out(tmp_path: Path) -> None:
    row = {"mode": "disaggregated", "gpus": "", "tp": "", "p_tp": "1", "d_tp": "4"}
    _, unread = read_points(table(tmp_path, row | {"p_workers": "", "d_workers": ""}))
    assert [one.reason for one in unread] == ["number of prefill and decode servers not known"]


def test_ranks_of_attention_are_members_of_a_group(tmp_path: Path) -> None:
    row = {"mode": "disaggregated", "gpus": "24", "tp": "", "gpu": "H200-SXM", "engine": "trtllm"}
    row |= {"model": "deepseek-ai/DeepSeek-R1", "p_workers": "1", "p_tp": "8", "p_ep": "8"}
    decode = {"d_workers": "2", "d_tp": "1", "d_dp": "8", "d_ep": "8"}
    points, unread = read_points(table(tmp_path, row | decode))
    assert unread == []
    assert points[0].gpus == 24
    config = config_from_text(configuration(Job(points[0])), "point")
    groups = [(r.role, r.count, r.expert_parallel, r.data_parallel_group) for r in config.replicas]
    assert groups == [
        ("prefill", 1, 8, ""),
        ("decode", 8, 8, "decode 0"),
        ("decode", 8, 8, "decode 1"),
    ]


def test_the_name_of_a_run_counts_where_columns_count_ranks_twice(tmp_path: Path) -> None:
    row = {"gpus": "16", "tp": "16", "ep": "4", "dp": "1", "note": "raw id says tp4 ep4"}
    untold = {"id": "b", "gpus": "64", "tp": "64", "ep": "8", "moe_tp": "8"}
    points, unread = read_points(table(tmp_path, row, untold))
    assert unread == []
    (server,) = points[1].servers
    assert (server.tensor_parallel, server.expert_parallel) == (8, 8)
    (server,) = points[0].servers
    assert (server.tensor_parallel, server.expert_parallel, server.gpus) == (4, 4, 4)


def test_random_tokens_encode_slowly_and_a_language_does_not(tmp_path: Path) -> None:
    points, _ = read_points(table(tmp_path, {}, {"id": "b", "source": "nvidia-aic-gap-analysis"}))
    told = ["prompt_token_us" in configuration(Job(point)) for point in points]
    assert told == [True, False]


def test_a_sample_goes_in_turn_through_the_strata_and_depends_on_the_seed(tmp_path: Path) -> None:
    rows = [{"id": f"q{i}", "load_value": str(i)} for i in range(1, 9)]
    rows += [{"id": "l", "model": "meta-llama/Llama-3.1-8B"}]
    points, _ = read_points(table(tmp_path, *rows))
    two = sampled(points, 2, 0)
    assert {point.model for point in two} == {"Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B"}
    assert sampled(points, 4, 0)[:2] == two
    assert sampled(points, 0, 0) == points
    assert len({sampled(points, 3, seed)[0].point_id for seed in range(20)}) > 1


def test_a_point_is_emulated_and_its_error_told(tmp_path: Path) -> None:
    table(tmp_path, {}, {"id": "b", "spec": "mtp1"})
    board = board_of(tmp_path)
    (row,) = board.compared
    assert row.kind == "dense"
    assert 1 < row.emulated.tpot_ms < 100
    assert row.error("tpot_ms") == pytest.approx(100 * (row.emulated.tpot_ms / 10 - 1))
    assert board.left_out == {"drafts are not emulated here: mtp1": 1}
    names = {(group.by, group.name) for group in groups_of(board.compared)}
    assert ("engine, GPU, precision, kind", "vllm, H100-SXM5-80GB, fp8, dense") in names


def test_whether_drafts_were_on_is_one_choice_for_a_series(tmp_path: Path) -> None:
    slow, fast = {"spec": "unknown", "tpot_ms": "8"}, {"spec": "unknown", "tpot_ms": "3"}
    table(
        tmp_path,
        {"id": "a_c2_cfg1", **slow},
        {"id": "b_c2_cfg2", **fast},
        {"id": "b_c4_cfg2", **fast, "load_value": "4"},
        # Slower than its series, which had drafts.
        {"id": "b_c1_cfg2", **fast, "load_value": "1", "tpot_ms": "7"},
    )
    board = board_of(tmp_path)
    assert [row.point.point_id for row in board.compared] == ["a_c2_cfg1"]
    assert board.left_out == {TAKEN_AS_DRAFTED: 3}


def test_a_series_with_drafts_is_emulated_with_those_that_are_nearest(tmp_path: Path) -> None:
    model = {"model": "deepseek-ai/DeepSeek-R1", "gpu": "B200-SXM", "gpus": "8", "tp": "8"}
    server = model | {"engine": "sglang", "version": "0.5.9", "isl": "64", "osl": "48"}
    server["measured_on"] = "2026-03-25"  # since February its scripts have two drafts, or none
    path = table(tmp_path, server)
    (point,), _ = read_points(path)
    tpot_ms = [emulate(Job(point, drafts=drafts)).tpot_ms for drafts in (0, 2)]
    assert tpot_ms == sorted(tpot_ms, reverse=True)
    rows = [
        server | {"id": f"{name}_c2_{name}", "spec": "unknown", "tpot_ms": f"{measured:.3f}"}
        for name, measured in (
            ("cfg0", tpot_ms[0]), ("cfg2", 0.97 * tpot_ms[1])
        )
    ]  # fmt: skip
    table(tmp_path, *rows)
    board = board_of(tmp_path)
    assert [row.drafts for row in board.compared] == [0, 2]
    assert board.compared[1].error("tpot_ms") == pytest.approx(100 * (1 / 0.97 - 1), abs=0.1)
    names = {group.name for group in board.groups if group.by == "drafts"}
    assert names == {"chosen by series: none", "chosen by series: 2"}


@pytest.mark.parametrize(
    ("row", "drafts"),
    [
        ({"engine": "sglang", "gpu": "H200-SXM"}, (0,)),
        ({"engine": "sglang", "gpu": "B200-SXM", "measured_on": "2026-01-20"}, (0,)),
        ({"engine": "sglang", "gpu": "B200-SXM"}, (0, 2)),
        ({"engine": "trtllm", "gpu": "H200-SXM", "measured_on": "2025-12-15"}, (0,)),
        ({"engine": "trtllm", "gpu": "H200-SXM", "measured_on": "2026-01-14"}, (3,)),
        ({"engine": "trtllm", "gpu": "H200-SXM", "measured_on": ""}, (0, 3)),
        ({"engine": "sglang", "gpu": "H200-SXM", "source": "elsewhere"}, (0, 1, 3)),
        ({"engine": "sglang", "gpu": "B200-SXM", "spec": "none?"}, (0,)),
    ],
)
def test_scripts_of_the_day_say_which_drafts_a_server_may_have_had(
    tmp_path: Path, row: dict[str, str], drafts: tuple[int, ...]
) -> None:
    model = {"model": "deepseek-ai/DeepSeek-R1", "gpus": "8", "tp": "8", "spec": "unknown"}
    points, _ = read_points(table(tmp_path, model | {"measured_on": "2026-03-25"} | row))
    assert recipe_of(points[0]).drafts == drafts


def test_launch_scripts_set_what_servers_do_beside_the_defaults(tmp_path: Path) -> None:
    deepseek = {"model": "deepseek-ai/DeepSeek-R1", "gpus": "8", "tp": "8", "isl": "1024"}
    deepseek["version"] = ""
    sglang = deepseek | {"engine": "sglang", "gpu": "B200-SXM", "osl": "1024", "load_value": "64"}
    early = sglang | {"engine": "trtllm", "gpu": "H200-SXM", "measured_on": "2025-12-15"}
    points, _ = read_points(table(tmp_path, sglang, early, early | {"measured_on": "2026-01-28"}))
    looking, one, many = (config_from_text(configuration(Job(p)), "point") for p in points)
    assert looking.scheduler.scheduler_recv_interval == 30
    assert looking.engine.stream_interval == 30
    assert one.scheduler.max_num_tokens == 1152  # a prompt and a token of each client
    assert one.engine.version == "1.1"
    assert many.scheduler.max_num_tokens == 8192


def test_a_row_that_contradicts_its_checkpoint_is_left_out(tmp_path: Path) -> None:
    row = {"model": "deepseek-ai/DeepSeek-V3", "precision": "fp4", "gpu": "B200-SXM"}
    points, _ = read_points(table(tmp_path, row | {"gpus": "8", "tp": "8"}))
    assert "has weights of fp8_block, the row says fp4" in emulate(Job(points[0])).refused


def test_four_bits_of_a_model_of_eight_are_nvidias_checkpoint(tmp_path: Path) -> None:
    row = {"model": "deepseek-ai/DeepSeek-R1", "precision": "fp4", "gpu": "B200-SXM", "gpus": "8"}
    row |= {"tp": "8", "engine": "trtllm", "isl": "1024", "osl": "1024", "version": ""}
    row |= {"source": "inferencex-test", "load_value": "256"}
    day = {"measured_on": "2025-12-15"}
    points, _ = read_points(table(tmp_path, row | day, row | {"measured_on": "2026-02-10"}))
    old, new = (config_from_text(configuration(Job(p)), "point") for p in points)
    assert old.model.name == "nvidia/DeepSeek-R1-0528-NVFP4-v2"
    assert [c.latency.nvfp4_experts for c in (old, new)] == ["cutlass", "native"]


def test_tensorrt_llm_takes_the_keys_and_values_that_nvidias_checkpoint_names(
    tmp_path: Path,
) -> None:
    row = {"model": "nvidia/Llama-3.3-70B-Instruct", "gpu": "H200-SXM", "version": ""}
    path = table(
        tmp_path,
        row | {"engine": "trtllm"},
        row | {"engine": "trtllm", "precision": ""},
        row | {"engine": "vllm"},
    )
    points, _ = read_points(path)
    told = ["kv_cache_dtype" in configuration(Job(point)) for point in points]
    assert told == [True, False, True]  # a flag of its script, in vLLM


def test_a_row_may_name_activations_that_are_wider_than_the_weights(tmp_path: Path) -> None:
    row = {"model": "openai/gpt-oss-120b", "precision": "fp8", "gpu": "H200-SXM"}
    points, _ = read_points(table(tmp_path, row))
    assert 'name = "openai/gpt-oss-120b"' in configuration(Job(points[0]))


def test_a_peers_errors_stand_beside(tmp_path: Path) -> None:
    table(tmp_path, {})
    (tmp_path / "peer.csv").write_text("id,tool,ttft_ms,tpot_ms\na,other,75,9\n", encoding="utf-8")
    board = board_of(tmp_path)
    assert board.compared[0].peers["other"]["ttft_ms"] == pytest.approx(50)
    assert board.groups[0].peers["other"]["tpot_ms"].median == pytest.approx(10)


def test_a_model_that_nobody_knows_is_left_out(tmp_path: Path) -> None:
    table(tmp_path, {}, {"id": "b", "model": "someone/Unknown-9B"})
    board = board_of(tmp_path)
    assert len(board.compared) == 1
    assert any("Unknown-9B" in reason for reason in board.left_out)


def test_the_command_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path, {}, {"id": "b", "dp": "8"})
    assert main(["fidelity", str(tmp_path), "--json", "-j", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    reason = "attention data parallelism without whole experts on its ranks"
    assert document["left_out"] == {reason: 1}
    assert document["points"][0]["error_percent"].keys() == {"ttft_ms", "tpot_ms"}
    assert main(["fidelity", str(tmp_path), "-j", "1"]) == 0
    assert "1 points, 1 rows left out" in capsys.readouterr().out


def test_a_table_is_named_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path, {}, {"id": "b", "dp": "8"})
    (file,) = tables_below(tmp_path)
    assert main(["fidelity", str(tmp_path), "--json", "-j", "1"]) == 0
    of_folder = capsys.readouterr().out
    assert main(["fidelity", str(file), "--json", "-j", "1"]) == 0
    assert capsys.readouterr().out == of_folder


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", ":1: engine: no such column: this is no point table"),
        (f"{'a' * 200_000},b\n1,2\n", ":1: field larger than field limit"),
    ],
)
def test_a_file_that_is_no_table_is_one_line(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.csv"
    file.write_text(text, encoding="utf-8")
    assert main(["fidelity", str(file)]) == 2
    assert problem in capsys.readouterr().err
    assert tables_below(tmp_path) == []
    with pytest.raises(InputError, match="no measured run found"):
        fidelity_command(FidelityOptions(directory=tmp_path))


def test_each_engine_is_left_out_of_its_own_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": f"{engine}{gpu}", "engine": engine, "gpu": gpu, "version": ""}
        for engine in ("vllm", "sglang")
        for gpu in ("H100-SXM", "H200-SXM")
    ]
    table(tmp_path, *rows)
    assert main(["fidelity", str(tmp_path), "--leave-out", "engine", "--json", "-j", "1"]) == 0
    intervals = json.loads(capsys.readouterr().out)["intervals"]
    assert {(one["group"], one["points"]) for one in intervals} == {("vllm", 2), ("sglang", 2)}
    assert main(["fidelity", str(tmp_path), "--leave-out", "gpu", "-j", "1"]) == 0
    assert "each of 2 GPUs left out" in capsys.readouterr().out


def test_a_gpu_that_is_left_out_has_the_kernels_of_its_relative(tmp_path: Path) -> None:
    table(tmp_path, {"gpu": "H100-SXM"}, {"id": "b", "gpu": "H200-SXM"})
    options = FidelityOptions(directory=tmp_path, sample=0, jobs=1, leave_out="gpu")
    board = point_board(options)
    assert {(one.left_out, one.kernels, one.points) for one in board.refits} == {
        ("H100-SXM5-80GB", "H200-SXM-141GB", 1),
        ("H200-SXM-141GB", "H100-SXM5-80GB", 1),
    }
    assert relative("L40S", "vllm") == ""
    shipped = board_of(tmp_path)
    for mine, own in zip(board.compared, shipped.compared, strict=True):
        assert mine.emulated.tpot_ms != own.emulated.tpot_ms
        assert mine.emulated.tpot_ms == pytest.approx(own.emulated.tpot_ms, rel=0.2)


def test_several_processes_say_the_same(tmp_path: Path) -> None:
    table(tmp_path, {}, {"id": "b", "gpu": "H200-SXM"})
    one, two = (point_board(FidelityOptions(directory=tmp_path, jobs=jobs)) for jobs in (1, 2))
    assert repr(one.compared) == repr(two.compared)


def test_rows_that_are_all_refused_are_an_input_error(tmp_path: Path) -> None:
    table(tmp_path, {"model": "nobody/knows-it"})
    with pytest.raises(InputError, match="no point can be emulated"):
        board_of(tmp_path)


@pytest.mark.parametrize(("rate", "is_left"), [("13", False), ("1000", True), ("0.01", True)])
def test_lengths_are_those_that_rates_say_if_they_can_be(
    rate: str, is_left: bool, tmp_path: Path
) -> None:
    columns = ["requests_per_s", "total_tokens_per_s", "output_tokens_per_s_per_gpu"]
    row = ROW | {"source": "InferenceX together_runner branch", "isl": "1024", "osl": "1024"}
    path = tmp_path / "rates.csv"
    cells = [row.get(column, "") for column in COLUMNS] + [rate, "8780", "1000"]
    path.write_text(f"{HEADER},{','.join(columns)}\n{','.join(cells)}\n", encoding="utf-8")
    points, unread = read_points(path)
    if is_left:
        assert "do not go together" in unread[0].reason
    else:
        assert (points[0].prompt_tokens, points[0].output_tokens) == (1042, 307)


def test_constants_are_fitted_to_the_points_of_other_models(tmp_path: Path) -> None:
    """The first model's first tokens show what a token of random text takes; the second's take
    that, and without the first they take what a token of a language takes."""
    small = {"model": "Qwen/Qwen3-0.6B", "precision": "", "isl": "8000"}
    shapes = [
        small | {"id": f"{gpu}{tp}", "gpu": gpu, "tp": tp, "gpus": tp}
        for gpu in ("H100-SXM", "H200-SXM", "B200")
        for tp in ("1", "2")
    ]
    rows = []
    for shape, point in zip(shapes, read_points(table(tmp_path / "m", *shapes))[0], strict=True):
        slow = emulate(Job(point, constants={TOKEN: 20.0}))
        rows.append(shape | {"ttft_ms": str(slow.ttft_ms), "tpot_ms": str(slow.tpot_ms)})
    other = {"id": "b", "model": "meta-llama/Llama-3.1-70B", "ttft_ms": "1", "tpot_ms": "1"}
    table(tmp_path, *rows, {"isl": "8000"} | other | {"load_value": "2000", "osl": "64"})
    path = tmp_path / "points.csv"
    board = point_board(FidelityOptions(directory=path, sample=0, jobs=1, leave_out="model"))
    found = {one.left_out.partition(" ")[0]: one.constants[TOKEN] for one in board.refits}
    assert found["llama"] == pytest.approx(20.0, rel=0.2)
    assert found["qwen3"] == 0.5, "no point is left that shows it"


def test_runs_know_no_engine_to_leave_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="engine is for point tables"):
        fidelity_command(FidelityOptions(directory=tmp_path, leave_out="engine"))


@pytest.mark.parametrize("option", ["seeds", "rounds"])
def test_what_only_runs_read_is_refused_for_points(option: str, tmp_path: Path) -> None:
    path = table(tmp_path, {})
    given: dict[str, Any] = {option: 7}
    with pytest.raises(InputError, match=f"--{option}: is for measured runs"):
        fidelity_command(FidelityOptions(directory=path, **given))


def test_a_table_without_a_usable_row_is_an_input_error(tmp_path: Path) -> None:
    table(tmp_path, {"dp": "8"})
    with pytest.raises(InputError, match=r"no point can be emulated .1 rows: attention data"):
        board_of(tmp_path)


def test_a_file_of_another_kind_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert tables_below(tmp_path) == []
    with pytest.raises(InputError, match="this is no point table"):
        read_points(tmp_path / "x.csv")


@needs_shared
def test_every_published_row_is_a_point_or_has_a_reason() -> None:
    for path in tables_below(SHARED / "silicon"):
        points, unread = read_points(path)
        with path.open(encoding="utf-8") as file:
            rows = sum(1 for _ in file) - 1
        assert len(points) + len(unread) == rows, path.name


@needs_shared
def test_a_published_point_is_emulated_as_published() -> None:
    points, _ = read_points(SHARED / "silicon" / "inferencex.csv")
    usable = [p for p in points if p.drafts == "none" and not p.is_doubtful]
    dense = next(p for p in usable if p.model.endswith("Llama-3.1-70B") and p.clients <= 8)
    found = emulate(Job(dense, SHARED / "silicon" / "model-configs"))
    assert found.refused == ""
    assert found.tpot_ms == pytest.approx(dense.tpot_ms, rel=0.3)


def test_gpus_of_a_rack_are_joined_by_nvlink(tmp_path: Path) -> None:
    row = {"mode": "disaggregated", "gpus": "16", "tp": "", "p_workers": "1", "p_tp": "8"}
    row |= {"d_workers": "1", "d_tp": "8", "engine": "sglang"}
    points, _ = read_points(table(tmp_path, row | {"gpu": "GB200"}, row))
    rack, machines = (config_from_text(configuration(Job(one)), "p").nodes[0] for one in points)
    assert (rack.gpus, rack.count) == (16, 1)
    assert (machines.gpus, machines.count) == (8, 2)


def test_sglangs_two_servers_agree_on_a_request_before_its_first_token(tmp_path: Path) -> None:
    row = {"mode": "disaggregated", "gpus": "2", "tp": "", "p_workers": "1", "p_tp": "1"}
    row |= {"d_workers": "1", "d_tp": "1"}
    texts = [
        configuration(Job(one))
        for one in read_points(table(tmp_path, row | {"engine": "sglang"}, row))[0]
    ]
    assert ["connector_us = 60000" in text for text in texts] == [True, False]
