"""Every kind of bad configuration: one line, with the file, the line, the key and the problem."""

from __future__ import annotations

import os
import pickle
import tomllib
from pathlib import Path

import pytest

from emu.config.input_files import read_input
from emu.config.load import config_from_text, load_config
from emu.config.tables import tag_of
from emu.config.tables.routing import ROUTERS
from emu.config.tables.scheduling import SCHEDULERS
from emu.errors import InputError
from emu.runs.runner import prepare

KINDS = {"ROUTERS": ROUTERS, "SCHEDULERS": SCHEDULERS}
"""Words in expected messages that stand for all names of a registry."""
BAD: list[tuple[str, str, str]] = [
    # name, text, expected message after "c.toml"
    ("negative", "seed = -3", ":1: seed: expected an integer >= 0, got -3"),
    ("zero_count", "[[replicas]]\ncount = 0", ":2: replicas.0.count: expected an integer >= 1, got 0"),
    ("too_large", "seed = 99999999999999999999", ":1: seed: expected an integer <= 9223372036854775807, got 99999999999999999999"),
    ("huge", "seed = 1" + "0" * 400, ":1: seed: expected an integer <= 9223372036854775807, got a huge integer"),
    ("huge_number", "[slo]\nttft_ms = 1" + "0" * 400, ":2: slo.ttft_ms: expected a number <= 1e+15, got a huge integer"),
    ("bool_for_int", "seed = true", ":1: seed: expected an integer >= 0, got true"),
    ("float_for_int", "seed = 1.0", ":1: seed: expected an integer >= 0, got 1.0; write 1"),
    ("text_for_int", '[scheduler]\n\nmax_num_seqs = "64"', ':3: scheduler.max_num_seqs: expected an integer >= 0, got "64"; write 64 without quotes'),
    ("int_for_text", "[model]\nname = 7", ":2: model.name: expected a string, got 7"),
    ("int_for_bool", "[scheduler]\nleap = 1", ":2: scheduler.leap: expected true or false, got 1"),
    ("text_for_float", '[slo]\ntpot_ms = "fast"', ':2: slo.tpot_ms: expected a number >= 0, got "fast"'),
    ("nan", "[slo]\nttft_ms = nan", ":2: slo.ttft_ms: expected a number >= 0, got nan"),
    ("inf", "[workload]\ntime_scale = inf", ":2: workload.time_scale: expected a number > 0, got inf"),
    ("nan_without_bounds", "[[nodes]]\nnvlink_gbps = nan", ":2: nodes.0.nvlink_gbps: expected a number, got nan"),
    ("not_positive", "[workload]\ntime_scale = 0", ":2: workload.time_scale: expected a number > 0, got 0"),
    ("fraction", "[scheduler]\ngpu_memory_utilization = 1.5", ":2: scheduler.gpu_memory_utilization: expected a number <= 1, got 1.5"),
    ("date", "seed = 2024-05-01", ":1: seed: expected an integer >= 0, got a date or time (2024-05-01)"),
    ("array_for_text", "[model]\nname = []", ":2: model.name: expected a string, got an array"),
    ("table_for_array", "[nodes]\ngpus = 8", ":1: nodes: expected an array, got a table; write [[nodes]]"),
    ("array_for_table", "[[model]]\nname = 'x'", ":1: model: expected a table, got an array; set its keys, such as model.name"),
    ("number_for_table", "scheduler = 3", ":1: scheduler: expected a table, got 3; set its keys, such as scheduler.block_size"),
    ("bad_literal", "[network]\nkv_transfer = 'layerwize'", ':2: network.kv_transfer: expected one of "blocking", "layerwise", got "layerwize"; did you mean "layerwise"?'),
    ("literal_type", "[network]\nkv_transfer = 1", ':2: network.kv_transfer: expected one of "blocking", "layerwise", got 1'),
    ("gpu_type", "[[nodes]]\ngpu = 4", ":2: nodes.0.gpu: expected a string or a table, got 4"),
    ("gpu_table", "[[nodes]]\ngpu = {memory_gib = 80, memory_gbytes_per_s = 2000}", ":2: nodes.0.gpu.tflops_fp16: missing, and it has no default"),
    ("missing", "\n[[faults]]\nat_s = 1", ":2: faults.0.kind: missing, and it has no default"),
    ("other_policy", '[scheduler]\npolicy = "vllm"\nchunk_size = 64', ':3: scheduler.chunk_size: means nothing with policy = "vllm"; it is a key of policy = "sarathi"'),
    ("default_policy", "[scheduler]\nmax_tokens = 64", ':2: scheduler.max_tokens: means nothing with policy = "vllm"; it is a key of policy = "orca" or "faster_transformer"'),
    ("other_backend", '[latency]\nbackend = "roofline"\nper_token_us = 9', ':3: latency.per_token_us: means nothing with backend = "roofline"; it is a key of backend = "linear"'),
    ("no_sampler", '[latency]\nbackend = "linear"\nsampling = "top_p"', ':3: latency.sampling: means nothing with backend = "linear"; it is a key of backend = "roofline" or "aiconfigurator" or "vidur"'),
    ("no_kernels", '[latency]\nbackend = "linear"\nstep_overhead_us = 9', ':3: latency.step_overhead_us: means nothing with backend = "linear"; it is a key of backend = "roofline" or "profile" or "astra-sim" or "aiconfigurator" or "vidur" or "package.module:Class"'),
    ("group_policy", '[scheduler]\npolicy = "sarathi"\n[[replicas]]\nscheduler = { max_num_seqs = 4 }', ':4: replicas.0.scheduler.max_num_seqs: means nothing with policy = "sarathi"; it is a key of policy = "vllm" or "package.module:Class"'),
    ("group_backend", '[[replicas]]\nlatency = { backend = "linear", round_tokens_to = 8 }', ':2: replicas.0.latency.round_tokens_to: means nothing with backend = "linear"; it is a key of backend = "roofline" or "astra-sim" or "vidur"'),
    ("fcfs_order", '[scheduler]\npolicy = "fcfs"\norder = "priority"', ':3: scheduler.order: fcfs takes requests as they come; it needs "arrival"'),
    ("fcfs_passing", '[scheduler]\npolicy = "fcfs"\n[[replicas]]\nscheduler = { skip_blocked = true }', ":4: replicas.0.scheduler.skip_blocked: fcfs takes requests as they come; it needs false"),
    ("unknown_key", "[scheduler]\nmax_num_seq = 4", ":2: scheduler.max_num_seq: unknown key; did you mean max_num_seqs?"),
    ("unknown_dashed", "[scheduler]\nmax-num-seqs = 4", ":2: scheduler.max-num-seqs: unknown key; did you mean max_num_seqs?"),
    ("unknown_table", "[schedular]\nleap = true", ":1: schedular: unknown key; did you mean scheduler?"),
    ("wrong_table", "max_num_seqs = 4", ":1: max_num_seqs: unknown key; did you mean scheduler.max_num_seqs?"),
    ("unknown_nothing_near", "[slo]\nzzz = 4", ":2: slo.zzz: unknown key; known keys are ttft_ms, ttft_ms_per_token, ttft_base_ms, tpot_ms, e2e_ms"),
    ("unknown_in_second_table", "[[nodes]]\n[[nodes]]\ngpux = 2", ":3: nodes.1.gpux: unknown key; did you mean gpu?"),
    ("unknown_inline", "workload = { path = '',\n  synthetic = { request = 3 } }", ":1: not valid TOML"),
    ("unknown_dotted", "workload.synthetic.request = 3", ":1: workload.synthetic.request: unknown key; did you mean requests?"),
    ("override_key", "[[replicas]]\nscheduler = { max_num_seq = 3 }", ":2: replicas.0.scheduler.max_num_seq: unknown key; did you mean max_num_seqs?"),
    ("override_value", "[[replicas]]\n[replicas.scheduler]\nblock_size = 0", ":3: replicas.0.scheduler.block_size: expected an integer >= 1, got 0"),
    ("override_policy", "[[replicas]]\nscheduler.policy = 'vlm'", ':2: replicas.0.scheduler.policy: expected one of SCHEDULERS, package.module:Class; got "vlm"; did you mean vllm?'),
    ("policy", "[router]\npolicy = 'laod'", ':2: router.policy: expected one of ROUTERS, package.module:Class; got "laod"; did you mean load?'),
    ("preset", "[autoscale]\npreset = 'blitz_scale'", ':2: autoscale.preset: expected one of blitzscale, multicast, network, serverlessllm, allcache, distserve_full, distserve_half, hpa; got "blitz_scale"; did you mean blitzscale?'),
    ("no_nodes", "nodes = []", ":1: nodes: expected at least one table, got an empty array"),
    ("no_replicas", "replicas = []", ":1: replicas: expected at least one table, got an empty array"),
    ("too_few_gpus", "[[nodes]]\ngpus = 2\n[[replicas]]\ncount = 2\ntensor_parallel = 2", ":3: replicas: the replicas need 4 GPUs (2 x 2), the nodes have 2: add nodes, or lower count or tensor_parallel"),
    ("gpus_length", "[[replicas]]\ncount = 2\ngpus = [0]", ":3: replicas.0.gpus: expected 2 indices (count 2 x tensor_parallel 1 x pipeline_parallel 1), got 1"),
    ("gpus_range", "[[replicas]]\ngpus = [8]", ":2: replicas.0.gpus.0: expected an index from 0 to 7, got 8"),
    ("gpus_twice", "[[replicas]]\ngpus = [0]\n[[replicas]]\ngpus = [0]", ":4: replicas.1.gpus.0: GPU 0 already belongs to replicas.0"),
    ("prefill_alone", "[[replicas]]\nrole = 'prefill'", ":1: replicas: prefill replicas need at least one decode replica"),
    ("all_inactive", "[[replicas]]\nrole = 'inactive'", ":1: replicas: every replica is inactive, and nothing will ever start one"),
    ("two_workloads", "[workload]\npath = 'a'\n[workload.synthetic]\nrequests = 3", ":3: workload.synthetic: beside a path, only arrivals can be given: the lengths are the file's"),
    ("no_file", "[workload]\npath = 'traces/none.jsonl'", ":2: workload.path: no such file: traces/none.jsonl"),
    ("min_max", "[workload.synthetic.prompt]\nmin = 9\nmax = 8", ":2: workload.synthetic.prompt.min: expected at most max = 8, got 9"),
    ("turns", "[workload.synthetic]\nsessions = { turns_min = 3 }", ":2: workload.synthetic.sessions.turns_min: expected at most turns_max = 1, got 3"),
    ("points", "[workload.synthetic.arrivals]\nprocess = 'piecewise'\npoints = [\n  [0, 1],\n  [5, 2],\n  [5, 3],\n]", ":6: workload.synthetic.arrivals.points.2.0: expected a second > 5, got 5"),
    ("points_few", "[workload.synthetic.arrivals]\nprocess = 'piecewise'", ':1: workload.synthetic.arrivals.points: expected at least two [second, rate] pairs for process = "piecewise"'),
    ("lower_upper", "[autoscale]\ndecode_lower = 0.9\ndecode_upper = 0.9", ":2: autoscale.decode_lower: expected less than decode_upper = 0.9, got 0.9"),
    ("min_replicas", "[autoscale]\nplanner = 'hpa'\nmin_replicas = 5\nmax_replicas = 4", ":3: autoscale.min_replicas: expected at most max_replicas = 4, got 5"),
    ("fault_replica", "[[faults]]\nat_s = 1\nkind = 'replica_crash'\nreplica = 1", ":4: faults.0.replica: expected an index from 0 to 0, got 1"),
    ("command_replica", "[[commands]]\nat_s = 1\nreplica = 3\ncommand = 'deactivate'", ":3: commands.0.replica: expected an index from 0 to 0, got 3"),
    ("minus_two", "[[nodes]]\npcie_gbps = -2", ":2: nodes.0.pcie_gbps: expected a number > 0, or -1, got -2.0"),
    ("profile_path", "[latency]\nbackend = 'profile'", ':1: latency.path: missing; backend = "profile" reads its bundles there'),
    ("cxl", "[network]\ntiers = ['cpu', 'cxl']", ':2: network.tiers.1: "cxl" needs a node with cxl_gib > 0'),
    ("interval", "[output]\ntimeseries_interval_ms = 0.5", ":2: output.timeseries_interval_ms: expected 0 (no timeseries) or at least 1, got 0.5"),
    ("nul", '[model]\nname = "a\\u0000b"', ":2: model.name: contains a NUL character"),
    ("syntax", "seed = 1\n[model\nname = 'x'", ":2: column 7: not valid TOML: Expected ']' at the end of a table declaration"),
    ("syntax_end", "seed =", ":1: end of file: not valid TOML: Invalid value"),
    ("duplicate_table", "[slo]\n[model]\n[slo]", ":3: column 5: not valid TOML: Cannot declare slo twice"),
    ("duplicate_key", "seed = 1\nseed = 2\n", ":2: column 9: not valid TOML: Cannot overwrite a value"),
    ("digits", "[slo]\nttft_ms = 1" + "0" * 5000, ":2: not valid TOML"),
    ("first_of_several", "[slo]\nttft_ms = -1\n[model]\nnam = 'x'\n", ":2: slo.ttft_ms: expected a number >= 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_bad_config_says_where_and_what(text: str, expected: str) -> None:
    for word, kinds in KINDS.items():
        expected = expected.replace(word, ", ".join(map(tag_of, kinds)))
    with pytest.raises(InputError) as caught:
        config_from_text(text, "c.toml")
    message = str(caught.value)
    if expected.endswith("not valid TOML"):  # tomllib's wording differs between versions
        assert message.startswith(f"c.toml{expected.split(' ')[0]}")
        assert "not valid TOML" in message
    else:
        assert message == f"c.toml{expected}"
    assert "\n" not in message


SET: list[tuple[list[str], str]] = [
    (["seed=-1"], "--set: seed: expected an integer >= 0, got -1"),
    (["seed"], "--set: seed: expected KEY=VALUE"),
    (["=3"], "--set: =3: expected a dotted key such as router.policy"),
    (["a..b=3"], "--set: a..b: expected a dotted key such as router.policy"),
    (["replicas.0.cuont=4"], "--set: replicas.0.cuont: unknown key; did you mean count?"),
    (["replicas.2.count=4"], "--set: replicas.2: no such entry; the last index is 0; 1 adds an entry"),
    (["faults.1.kind=x"], "--set: faults.1: no such entry; it is empty; 0 adds an entry"),
    (["replicas.x.count=4"], '--set: replicas.x: replicas is an array; expected an index, got "x"; write replicas.0.x'),
    (["schedular.leap=true"], "--set: schedular: unknown key; did you mean scheduler?"),
    (["seed.x=1"], "--set: seed.x: seed is 7, which has no keys"),
    (["scheduler.leap=yes"], '--set: scheduler.leap: expected true or false, got "yes"; write true'),
    (["faults=[{at_s=1}]"], "--set: faults.0.kind: missing, and it has no default"),
    (["nodes.0.gpu={memory_gib=1}"], "--set: nodes.0.gpu.memory_gbytes_per_s: missing, and it has no default"),
    (["autoscale.min_decode=9", "autoscale.max_decode=8"], "--set: autoscale.min_decode: expected at most max_decode = 8, got 9"),
    (["workload.path=none.jsonl"], "--set: workload.path: no such file: none.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), SET, ids=[c[0][0] for c in SET])
def test_bad_override_names_set(overrides: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        config_from_text("seed = 7", "c.toml", overrides)
    assert str(caught.value) == expected


def test_a_problem_of_the_file_comes_before_one_of_an_override() -> None:
    with pytest.raises(InputError, match=r"^c\.toml:2: slo\.ttft_ms"):
        config_from_text("[slo]\nttft_ms = -1", "c.toml", ["seed=-1"])


def test_bad_files(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(InputError) as caught:
            load_config(path)
        return str(caught.value).removeprefix(str(tmp_path))

    assert message(tmp_path / "none.toml") == "/none.toml: no such file"
    assert message(tmp_path) == ": is a directory, expected a TOML file"
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"seed = 1\n[model]\nname = '\xff'\n")
    assert message(bad) == "/bad.toml:3: not valid UTF-8 (byte 0xff): save it as UTF-8"
    bad.write_bytes(b"\xef\xbb\xbfseed = 1\n\xff")
    assert message(bad) == "/bad.toml:2: not valid UTF-8 (byte 0xff): save it as UTF-8"
    bad.write_bytes(b"seed = " + b"[" * 100_000)
    assert message(bad).startswith("/bad.toml:1: nested too deeply")
    bad.write_bytes(b"\xef\xbb\xbfseed = 1\r\n[slo]\r\nttft_ms = -1\r\n")
    assert message(bad) == "/bad.toml:3: slo.ttft_ms: expected a number >= 0, got -1"
    bad.write_bytes(b"seed = 1\x00")
    assert "/bad.toml:1: column 9: not valid TOML" in message(bad)


# --- what no file should be ---------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "pipe"])
def test_what_is_no_regular_file_is_refused_unread(path: str, tmp_path: Path) -> None:
    """A device has no end; a pipe that no program writes to would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    place = tmp_path / path
    kind = "pipe" if path == "pipe" else "device"
    with pytest.raises(InputError, match=f"cannot be read: is a {kind}, expected a regular file$"):
        load_config(place)
    config = config_from_text(f"[workload]\npath = '{place}'\nformat = 'jsonl'\n", "c.toml")
    with pytest.raises(InputError, match=f"is a {kind}, expected a regular file: a workload"):
        prepare(config, "c.toml")
    with pytest.raises(InputError, match=f"is a {kind}, expected a regular file$"):
        read_input(place)


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(InputError, match="cannot be read: is larger than 64 MiB"):
        load_config(path)
    with pytest.raises(InputError, match="is larger than 4096 MiB"):
        read_input(path)


MANY = ".".join(["a"] * 20_000)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{MANY} = 1", 1),
        (f"seed = 1\n[{MANY}]", 2),
        (f"seed = 1\n[[{MANY}]]", 2),
        (f"model = {{ {MANY} = 1 }}", 1),
        ('seed = 1\n"a b"' + '."c"' * 20_000 + " = 1", 2),
        (f"name = '''\n'''\n{MANY} = 1", 3),
    ],
    ids=["key", "table", "array", "inline", "quoted", "behind_a_string"],
)
def test_a_key_of_thousands_of_parts_is_refused_before_it_is_read(
    text: str, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it took 11 s and 1.9 GB."""
    monkeypatch.setattr(tomllib, "loads", lambda _: pytest.fail("it is read"))
    with pytest.raises(InputError, match=rf"^c\.toml:{line}: a key of more than 64 parts$"):
        config_from_text(text, "c.toml")


def test_an_override_of_thousands_of_parts_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--set: a key of more than 64 parts$"):
        config_from_text("", "c.toml", [f"{MANY}=1"])


def test_dots_in_strings_and_comments_are_no_parts_of_keys() -> None:
    dots = ".".join(["a"] * 200)
    text = f"# {dots}\n[model]\nserved_name = '{dots}' # {dots}\n[slo]\nttft_ms = 5.0"
    assert config_from_text(text, "c.toml").model.served_name == dots


def test_a_message_repeats_no_long_text_in_full() -> None:
    with pytest.raises(InputError) as raised:
        config_from_text(f"[model]\n{'x' * 5_000} = 1", "c.toml")
    assert "xxx... (5,006 characters) ...xxx" in str(raised.value)
    assert raised.value.field == f"model.{'x' * 5_000}"
    assert len(str(raised.value)) < 2_500


def test_an_error_keeps_its_parts_on_the_way_from_another_process() -> None:
    error = InputError("c.toml", 3, "seed", "is wrong")
    again = pickle.loads(pickle.dumps(error))
    assert (again.source, again.line, again.field, again.problem) == (
        "c.toml",
        3,
        "seed",
        "is wrong",
    )
    assert str(again) == str(error)
