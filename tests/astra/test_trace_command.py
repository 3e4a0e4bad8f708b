"""`emu trace`: files of a batch, and reading them back."""

import pytest

from emu.apps.astra.trace import backend_of, parse_batch
from emu.backends.astra.graph import NodeKind
from emu.backends.astra.iteration import run_once
from emu.backends.astra.memories import Memories
from emu.cli import main
from emu.cluster.backends import make_latency
from emu.cluster.plan import make_plan
from emu.config.load import load_config
from emu.errors import InputError
from tests.astra.readback import parse_trace, read_graph
from tests.shared_data import SHARED, needs_shared

CONFIG = '[[nodes]]\ngpu = "H100-SXM"\ngpus = 4\n[[replicas]]\ntensor_parallel = {tp}\n'


def config(directory, tp=4, more=""):
    path = directory / "cluster.toml"
    path.write_text(CONFIG.format(tp=tp) + more)
    return path


def test_files_of_a_batch_run_as_they_say(tmp_path, capsys):
    path, out = config(tmp_path), tmp_path / "out"
    batch = ["--prefill", "512:0,20:16", "--decode", "32x1000"]
    assert main(["trace", str(path), *batch, "--out", str(out)]) == 0
    names = ["trace.txt", "network.yml", "system.json", "memory_expansion.json"]
    names += [f"batch.{npu}.et" for npu in range(4)]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == [str(out / name) for name in names]
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    graphs = [read_graph(out / f"batch.{npu}.et", npu) for npu in range(4)]
    reduces = [n for n in graphs[0].nodes if n.kind is NodeKind.COLL]
    # Llama-3.1-8B: two all-reduces of the hidden state in each of 32 layers.
    assert len(reduces) == 64
    assert {n.size_bytes for n in reduces} == {(512 + 20 + 32) * 4096 * 2}
    backend = backend_of(path, (), 0)
    shape = parse_batch("512:0,20:16", "32x1000")
    ends = run_once(backend.network, backend.memories, graphs)
    host_ns = backend.components_ns(shape)["cpu_overhead"]
    assert max(ends.values()) + host_ns == backend.iteration_ns(shape)
    assert printed[-1].startswith(f"embedded executor: {backend.iteration_ns(shape)} ns")
    text = (out / "trace.txt").read_text()
    assert parse_trace(text) == backend.trace(shape)
    assert isinstance(backend.memories, Memories)


def test_a_file_is_shown(tmp_path, capsys):
    out = tmp_path / "out"
    main(["trace", str(config(tmp_path, 1)), "--decode", "2x50,9", "--out", str(out)])
    capsys.readouterr()
    assert main(["trace", "--show", str(out / "batch.0.et")]) == 0
    head, *nodes = capsys.readouterr().out.splitlines()
    count = len(read_graph(out / "batch.0.et").nodes)
    assert head.startswith(f"# batch.0.et: {count} nodes")
    assert len(nodes) == count


def test_the_published_program_gets_a_finer_clock(tmp_path):
    out = tmp_path / "out"
    call = ["trace", str(config(tmp_path, 2)), "--decode", "4x10", "--out", str(out)]
    assert main([*call, "--dialect", "upstream"]) == 0
    assert '"remote-mem-bw"' in (out / "memory_expansion.json").read_text()


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        ("", "", "an empty batch"),
        ("0:5", "", "'0:5' is not NEW or NEW:CONTEXT"),
        ("a", "", "'a' is not NEW or NEW:CONTEXT"),
        ("", "4x", "'4x' is not CONTEXT or COUNTxCONTEXT"),
        ("", "4x-1", "is not CONTEXT"),
        ("", "99999999999x1", "is not CONTEXT"),
    ],
)
def test_a_batch_that_is_none(prefill, decode, problem):
    with pytest.raises(InputError, match=problem):
        parse_batch(prefill, decode)


def test_one_new_token_is_a_decode():
    shape = parse_batch("1:30,8", "2x5")
    assert (shape.prefill_new, shape.prefill_context) == ([8], [0])
    assert (shape.decode_count, shape.decode_context_sum) == (3, 40)
    assert (shape.decode_context_min, shape.decode_context_max, shape.sequences) == (5, 30, 4)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give a configuration file"),
        (["--show", "{tmp}/none.et"], "none.et"),
        (["{tmp}/cluster.toml", "--decode", "1x1", "--replica", "7"], "7 does not exist"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, problem):
    config(tmp_path)
    assert main(["trace", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


@needs_shared
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (1, 4)])
def test_the_profile_backend_is_the_same_sum(tmp_path, tp, pp):
    more = f'pipeline_parallel = {pp}\n[latency]\nbackend = "profile"\n'
    more += f'path = "{SHARED / "profiles"}"\nhardware = "RTXPRO6000"\nhost_overhead = false\n'
    path = config(tmp_path, tp, more + "step_overhead_us = 0.0\n")
    loaded = load_config(path)
    closed = make_latency(make_plan(loaded).replicas[0].latency_context(loaded))
    executed = backend_of(path, (), 0)
    for batch in (("512", ""), ("", "8x1000"), ("300:0,20:16", "4x2000")):
        shape = parse_batch(*batch)
        assert executed.iteration_ns(shape) == closed.iteration_ns(shape)
