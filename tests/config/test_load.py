"""Reading good configurations: defaults, overrides, paths, line numbers, fuzz."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.config.load import config_from_dict, config_from_text, effective_dict, load_config
from emu.config.places import line_of, locate
from emu.config.schema import Config, SyntheticTable
from emu.errors import InputError

MINIMAL = """
[model]
name = "meta-llama/Llama-3.1-8B"
[[nodes]]
gpu = "A100-SXM4-80GB"
[workload.synthetic]
requests = 10
"""


def test_a_minimal_file_is_six_lines() -> None:
    config = config_from_text(MINIMAL, "c.toml")
    assert config.workload.synthetic == SyntheticTable(requests=10)
    assert config.nodes[0].gpus == 8
    assert config.replicas[0].count == 1


def test_no_workload_becomes_the_default_synthetic_one() -> None:
    assert config_from_text("", "c.toml").workload.synthetic == SyntheticTable()
    assert config_from_dict({"workload": {"limit": 3}}).workload.synthetic == SyntheticTable()


def test_overrides_win_and_reach_defaults_arrays_and_inline_tables() -> None:
    config = config_from_text(
        MINIMAL,
        "c.toml",
        [
            "replicas.0.count=4",
            "scheduler.max_num_seqs = 64",
            "router.policy=random",
            "nodes.0.leaf=7",
            "model.name='x y'",
            'slo={ttft_ms=5, "tpot_ms"=6}',
            "replicas.0.scheduler.block_size=32",
            "workload.synthetic.arrivals.process=gamma",
            "autoscale.live=false",
            "autoscale.faithful=['a','b']",
        ],
    )
    assert config.replicas[0].count == 4
    assert config.replicas[0].scheduler == {"block_size": 32}
    assert config.scheduler.max_num_seqs == 64
    assert config.router.policy == "random"
    assert config.nodes[0].leaf == "7"
    assert config.model.name == "x y"
    assert (config.slo.ttft_ms, config.slo.tpot_ms) == (5.0, 6.0)
    assert config.workload.synthetic is not None
    assert config.workload.synthetic.arrivals.process == "gamma"
    assert config.workload.synthetic.requests == 10
    assert config.autoscale is not None
    assert config.autoscale.live is False
    assert config.autoscale.faithful == ["a", "b"]


def test_value_that_would_smuggle_a_second_key_is_a_string() -> None:
    """And a string with a line end is no name."""
    with pytest.raises(InputError, match=r"--set: nodes\.0\.leaf: contains the control character"):
        config_from_text("", "c.toml", ["nodes.0.leaf=1\nseed = 3"])


def test_relative_paths_are_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "t.jsonl").write_text("{}\n")
    file = tmp_path / "c.toml"
    file.write_text('[workload]\npath = "traces/t.jsonl"\n[output]\ndir = "out"\n')
    config = load_config(file)
    assert config.workload.path == str(tmp_path / "traces" / "t.jsonl")
    assert config.output.dir == str(tmp_path / "out")
    assert config.workload.synthetic is None
    other = load_config(file, [f"output.dir={tmp_path / 'elsewhere'}"])
    assert other.output.dir == str(tmp_path / "elsewhere")


def test_effective_dict_reads_back_as_the_same_config() -> None:
    config = config_from_text(MINIMAL, "c.toml", ["autoscale.executor=none"])
    plain = effective_dict(config)
    assert config_from_dict(plain) == config
    assert list(plain)[:3] == ["seed", "model", "nodes"]


def test_bom_and_crlf_are_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 5\r\n[slo]\r\nttft_ms = 3\r\n")
    config = load_config(file)
    assert (config.seed, config.slo.ttft_ms) == (5, 3.0)


def test_lines_of_every_kind_of_key() -> None:
    text = '''# comment with [brackets]
seed = 1
"quoted key".a.b = """
x = 1
"""
[a.b]
c = [ # comment ]
  1,
  { d = "]", e = [2,
 3] },
]
[[list]]
x = 1
[[list]]
[list.sub]
y = 'it''s' # z = 2
[[list.deep]]
z = 1979-05-27 07:32:00
[[list.deep]]
z = """a""""
w = 2
'''.replace("'it''s'", "'its'")
    lines = locate(text)
    assert lines["seed",] == 2
    assert lines["quoted key", "a", "b"] == 3
    assert lines["a", "b"] == 6
    assert lines["a", "b", "c", 0] == 8
    assert lines["a", "b", "c", 1, "e"] == 9
    assert lines["a", "b", "c", 1, "e", 1] == 10
    assert (lines["list", 0, "x"], lines["list", 1]) == (13, 14)
    assert lines["list", 1, "sub", "y"] == 16
    assert lines["list", 1, "deep", 1, "w"] == 21
    assert line_of(lines, ("list", 1, "sub", "missing")) == 15
    assert line_of(lines, ("nowhere",)) is None


def test_locator_agrees_with_the_line_of_every_default_key() -> None:
    """One key a line, written from the defaults: each must be found on its own line."""
    plain = effective_dict(config_from_text("", "c"))
    rows: list[str] = []
    expected = {}
    for table, value in plain.items():
        if isinstance(value, dict):
            rows.append(f"[{table}]")
            for key, inner in value.items():
                if inner is None or isinstance(inner, dict):
                    continue
                rows.append(f"{key} = {msgspec.json.encode(inner).decode()}")
                expected[table, key] = len(rows)
    lines = locate("\n".join(rows))
    assert {path: lines[path] for path in expected} == expected


BASE = (
    MINIMAL
    + """
[[replicas]]
count = 2
scheduler = { max_num_seqs = 4, policy = "vllm" }
[autoscale]
decode_lower = 0.5
[[faults]]
at_s = 1.5
kind = "replica_crash"
replica = 0
"""
)
PIECES = ["nan", "-1", "[", "]", "{", "}", '"', "'''", "=", "\n", ".", "true", "\x00", "1e999",
          "[[nodes]]", "é", "\ufeff", "\r", "99999999999999999999", "[a.b]", "#", "x=1"]  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_mutated_files_load_or_end_in_one_line(seed: int) -> None:
    rng = random.Random(seed)
    text = BASE
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        cut = rng.choice([0, 1, rng.randrange(20)])
        text = text[:at] + rng.choice(PIECES) + text[at + cut :]
    try:
        assert isinstance(config_from_text(text, "c.toml"), Config)
    except InputError as error:
        assert str(error).startswith("c.toml"), f"{seed=}"
        assert "\n" not in str(error), f"{seed=}"


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["seed", "nodes", "replicas", "slo", "workload", "autoscale", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["count", "gpus", "gpu", "scheduler", "path", "ttft_ms"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=6,
        ),
        max_size=3,
    )
)
def test_any_nested_value_converts_or_is_refused_in_words(raw: dict) -> None:
    try:
        assert isinstance(config_from_dict(raw), Config)
    except InputError as error:
        assert "Expected" not in str(error)  # msgspec's words never reach the user
