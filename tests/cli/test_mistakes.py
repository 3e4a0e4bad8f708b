"""Wrong inputs of the kind that people make: each is a line that names the way out."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from emu.cli import main

BASE = """
[model]
name = "Qwen/Qwen3-32B"
[[nodes]]
gpu = "H100"
gpus = 4
[[replicas]]
tensor_parallel = 2
count = 2
[workload.synthetic]
requests = 20
arrivals = {rate_per_s = 10}
prompt = {distribution = "fixed", value = 100}
output = {distribution = "fixed", value = 5}
"""
FILES = {
    "semicolons.csv": "arrival_s;prompt_tokens;output_tokens\n1;2;3\n",
    "negative.csv": "arrival_s,prompt_tokens,output_tokens\n1,-2,3\n",
    "cut.jsonl": '{"arrival_time_ns": 1, "input_toks": 1, "output_toks": 3\n',
    "epoch.csv": "arrival_s,prompt_tokens,output_tokens\n1732400000123,2,3\n",
    "own.csv": "time,prompt,completion\n1,2,3\n",
    "empty.csv": "",
    "header.csv": "arrival_s,prompt_tokens,output_tokens\n",
    "good.csv": "arrival_s,prompt_tokens,output_tokens\n0,9,3\n1,9,3\n",
    "dates.csv": "arrival_s,prompt_tokens,output_tokens\n2024-01-01 00:00:00,9,3\n",
    "rows.parquet": "PAR1\n",
    "words.txt": "prompts of last week\n",
    "cluster.json": '{"model": 1}',
    "base.toml": BASE,
    "two.toml": BASE.replace("gpus = 4", "gpus = 2"),
    "open.toml": BASE + "\n[router\n",
    "table.toml": BASE.replace("[[nodes]]", "[nodes]"),
    "old.toml": BASE + "\n[scheduler]\nmax_batch = 5\n",
}
RUN = "run base.toml --no-report -q -o runs/x --set"
PLAN = (
    "plan --model Qwen/Qwen3-32B --gpu H100 --rate 5 --preset code --requests 20 -j 1 -o runs/plan"
)
MADE = PLAN.replace("--preset code ", "")
WRONG = [
    ("run two.toml", "the replicas need 4 GPUs (2 x 2), the nodes have 2: add nodes, or lower"),
    ("run open.toml", "open.toml:16: column 8: not valid TOML"),
    ("run table.toml", "expected an array, got a table; write [[nodes]]"),
    ("run old.toml", "scheduler.max_batch: unknown key"),
    ("run nothere.toml", "no such file"),
    ("learn good.csv", "known are vllm bench serve --save-detailed"),
    ("run base.toml --seed x", "--seed: expected a whole number, got 'x'"),
    ("run base.toml --replicas 3", "not with a file: there --set replicas.0.count=N"),
    ("run base.toml --model Qwen/Qwen3-8B", "not with a file: there --set model.name=NAME"),
    ("run base.toml --requests 10", "or workload.synthetic.requests=N"),
    ("run --model Qwen/Qwen3-8B --rate 5 --preset chat", "run: --gpu: give at least one kind"),
    ("run --model Qwen/Qwen9-32B --gpu A100 --preset chat --rate 5", "did you mean 'Qwen/Qwen3"),
    ("run --model Qwen/Qwen3-8B --gpu A100 --preset chat --rate 5 --replicas 0", "at least 1"),
    (
        f"{RUN} replicas.count=4",
        'is an array; expected an index, got "count"; write replicas.0.count',
    ),
    (f"{RUN} model=Qwen/Qwen3-8B", "set its keys, such as model.name"),
    (f"{RUN} model.name=Qwen/Qwen9-32B", "did you mean 'Qwen/Qwen3-32B'"),
    (f"{RUN} model.dtype=fp16", 'did you mean "float16"?'),
    (f"{RUN} nodes.0.gpu=H1000", "did you mean 'H100-SXM5-80GB'"),
    (f"{RUN} model.name=meta-llama/Llama-3.1-405B", "raise tensor_parallel or pipeline_parallel"),
    (f"{RUN} replicas.0.role=prefil", 'did you mean "prefill"?'),
    (f"{RUN} replicas.0.role=decode", "decode replicas need at least one prefill replica"),
    (f"{RUN} replicas.0.tensor_parallel=3 nodes.0.gpus=8", "64 attention heads, which 3 GPUs"),
    (f"{RUN} replicas.0.pipeline_parallel=99 nodes.0.count=99", "64 layers, fewer than 99 stages"),
    (f"{RUN} scheduler.policy=vlm", "did you mean vllm?"),
    (f"{RUN} scheduler.max_num_seq=12", "did you mean max_num_seqs?"),
    (f"{RUN} scheduler.max_num_seqs=1e12", "write 1000000000000"),
    (f"{RUN} schedulr.policy=vllm", "did you mean scheduler?"),
    (f"{RUN} router.policy=least_loaded", "did you mean least_outstanding?"),
    (f"{RUN} autoscale.preset=hpa autoscale.target_valu=3", "did you mean target_value?"),
    (f"{RUN} slo.ttft_ms=500ms", "expected a number >= 0"),
    (f"{RUN} workload.synthetic.arrivals.rate_per_s=0", "expected a number > 0, got 0"),
    (f"{RUN} workload.path=nothere.csv", "no such file: nothere.csv"),
    (f"{RUN} workload.path=semicolons.csv", "separated by semicolons, not by commas"),
    (f"{RUN} workload.path=negative.csv", "negative.csv:2: prompt_tokens: must be at least 1"),
    (f"{RUN} workload.path=cut.jsonl", "cut.jsonl:1: $: not valid JSON"),
    (f"{RUN} workload.path=epoch.csv", "milliseconds since 1970: name the column arrival_ms"),
    (f"{RUN} workload.path=own.csv", "--columns arrival=time,prompt=prompt,output=completion"),
    (f"{RUN} workload.path=dates.csv", "--columns arrival=arrival_s,... reads dates"),
    (f"{RUN} workload.path=words.txt", "neither JSON lines nor a table with commas"),
    (f"{RUN} workload.path=rows.parquet", "is Parquet; write its rows as CSV or JSON lines"),
    (f"{RUN} workload.path=packed.csv.gz", "is compressed (gzip); unpack it"),
    (f"{RUN} workload.synthetic.requests=1k", 'got "1k"; write 1000'),
    (f'{RUN} workload.synthetic.requests="100"', "write 100 without quotes"),
    (f"{RUN} nodes.0.nic_gbps=100Gbps", "write the number alone: the name of a key has its unit"),
    (f"{RUN} scheduler.gpu_memory_utilization=90", "<= 1, got 90; write 0.9"),
    (f"{RUN} scheduler.prefix_caching=yes", 'got "yes"; write true'),
    (f'{RUN} faults=[{{at_ms=1,kind="replica_crash",replica=0}}]', "did you mean at_s?"),
    ("run good.csv", "is it a workload? emu run CONFIG --set workload.path=good.csv"),
    ("run cluster.json", "a configuration is TOML (emu init writes one)"),
    ("sweep base.toml", 'this file is a cluster, which a sweep file names: base = "base.toml"'),
    ("run --model Qwen/Qwen3-8B --gpu H100:2 --rate 5 --preset chat", "--gpu: a run takes NAME"),
    (f"{RUN} workload.path=empty.csv", "the file is empty"),
    (f"{RUN} workload.path=header.csv", "the file has no requests"),
    (f'{RUN} faults=[{{at_s=1,kind="replica_crash",replica=9}}]', "expected an index from 0 to 1"),
    (f'{RUN} faults=[{{at_s=1,kind="replica_crsh",replica=0}}]', "did you mean replica_crash?"),
    (
        "resilience base.toml",
        "faults: missing: add [[faults]], or see what breaks first: emu chaos",
    ),
    ("chaos base.toml --slo", "slo: missing: say which objectives"),
    ("chaos base.toml --rate gpu_crash=1", "--rate: goes with --slo"),
    ("chaos base.toml --moments 4", "--moments: goes with --slo"),
    ("chaos base.toml --slo --seeds 0:5", "--seeds: goes not with --slo"),
    ("chaos base.toml --slo --faults base.toml", "--faults: goes not with --slo"),
    ("chaos base.toml --slo --quick", "--quick: goes not with --slo"),
    ("chaos --corpus . --seeds 0:5", "--seeds: goes not with --corpus"),
    ("chaos --quick", "--quick: needs a configuration"),
    ("learn localhost:8000", "no such file; write http://localhost:8000"),
    ("serve base.toml --tokenizer none", "leave it out: a token is a byte then"),
    ("compare base.toml nothere", "no summary.json"),
    ("sweep nothere.toml", "no such file"),
    ("plan --gpu H100 --rate 5 --preset code --ttft-p95 1s", "--model: give a model"),
    (PLAN, "--ttft-p95: give at least one objective"),
    (f"{PLAN} --tpot-p95 50", "'50' needs a unit: 500ms, 0.5s, 10m or 2h"),
    (f"{PLAN} --tpot-p95 50us", "'50us' has no unit that is known ('us'): 500ms, 0.5s, 10m or 2h"),
    (f"{PLAN} --ttft-p95 1sec", "'1sec': write 1s"),
    (f"{PLAN} --ttft 1s", "unknown option --ttft; say --ttft-p95 500ms"),
    (f"{PLAN} --itl-p95 50ms", "unknown option --itl-p95; say --tpot-p95"),
    (f"{PLAN} --slo ttft=1s", "say --ttft-p95 500ms --tpot-p95 50ms"),
    (f"{PLAN} --ttft-p95 1s --qps 5", "unknown option --qps; say --rate"),
    (f"{PLAN} --ttft-p95 1s --gpu H200=2,5", "'H200=2,5': write H200=2.5"),
    (f"{PLAN} --ttft-p95 1s --gpu H200=$3", "write the number alone, in any currency"),
    (f"{PLAN} --ttft-p95 1s --dtype FP8", "did you mean fp8?"),
    (f"{PLAN} --ttft-p95 1s --survive gpu", "did you mean rank?"),
    ("plan base.toml --ttft-p95 1s", "unexpected 'base.toml'; it takes options alone, no file"),
    (f"{PLAN} --ttft-p95 1s --rate 5/s", "expected a number, got '5/s'; write 5"),
    (f"{PLAN} --ttft-p95 1s --tp 1,2,4", "expected a whole number, got '1,2,4'; write 1 2 4"),
    (f"{PLAN} --ttft-p95 1s --confidence 90%", "got '90%'; 90 % is 0.9"),
    (f"{PLAN} --ttft-p95 1s --gpu 8xH200", "stands behind a colon: H200:8"),
    (f"{PLAN} --ttft-p95 1s --gpu H200,B200", "--gpu H200 --gpu B200"),
    (f"{PLAN} --ttft-p95 1s --gpu H200=4/2", "the price of a reserved GPU comes first"),
    (f"{PLAN} --ttft-p95 1s --set workload.synthetic.requests=9", "its own: --requests"),
    (f"{PLAN} --ttft-p95 1s --set model.name=Qwen/Qwen3-8B", "has an option of its own: --model"),
    (f"{PLAN} --ttft-p95 1s --set nodes.0.hourly_price=3", "of its own: --gpu NAME=PRICE"),
    (f"{PLAN} --ttft-p95 1s --set slo.ttft_ms=9", "of its own: objectives such as --ttft-p95"),
    (f"{PLAN} --ttft-p95 1s --set workload.synthetic.arrivals.process=burst", "--workload FILE"),
    (f"{MADE} --prompt-tokens 3k --output-tokens 5 --ttft-p95 1s", "write 3000"),
    (f"{MADE} --prompt-tokens 3,000 --output-tokens 5 --ttft-p95 1s", "write 3000"),
    (f"{MADE} --prompt-tokens 9 --output-tokens 1 --tpot-p95 1s", "outputs of one token have no"),
    (f"{PLAN} --ttft-p96 1s", "unknown option --ttft-p96; did you mean --ttft-p9"),
    (f"{PLAN} --ttft-p95 1s --gpu H200=3", "H100-SXM5-80GB has no price, others have"),
    (f"{PLAN} --ttft-p95 1s --gpu H100", "H100-SXM5-80GB is given more than once"),
    (f"{PLAN} --ttft-p95 1s --tp 3", "64 attention heads cannot be shared by 3 GPUs"),
    (f"{PLAN} --ttft-p95 1s --tp 2 --max-gpus 1", "needs more GPUs than --max-gpus 1"),
    (f"{PLAN} --ttft-p95 1s --mode split", "there are colocated, disaggregated"),
    (f"{PLAN} --ttft-p95 1s --mix", "--mix: give two kinds of GPUs"),
    (f"{PLAN} --ttft-p95 1s --survive node", "there are replica, machine, rank, zone"),
    (f"{PLAN} --ttft-p95 1s --during ttft_p95=3s", "--during: goes with --survive"),
    (f"{PLAN} --ttft-p95 1s --away 10m", "--away: goes with --survive"),
    (f"{PLAN} --ttft-p95 1s --survive rank --zones 4", "--zones: goes with --survive zone"),
    (f"{PLAN} --ttft-p95 1s --survive rank --autoscale hpa", "add --autoscale none"),
    (f"{PLAN} --ttft-p95 1s --confidence 90", "must be at most 1, not 90"),
    (f"{PLAN} --ttft-p95 1s --confidence 0.5 --draws 0", "needs --draws above 0"),
    (f"{PLAN} --ttft-p95 1s --duration 100s", "cannot be given together with --requests"),
    (f"{PLAN} --ttft-p95 1s --workload good.csv", "a --workload file has its own lengths"),
    (f"{PLAN} --ttft-p95 1s --columns a=b", "--columns: names columns of a --workload FILE"),
    (f"{PLAN} --ttft-p95 1s --mode disaggregated --autoscale hpa", "add --mode colocated"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files, the working one."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(FILES["good.csv"].encode()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "way_out"), WRONG, ids=[line for line, _ in WRONG])
def test_a_mistake_is_a_line_that_names_the_way_out(
    line: str, way_out: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(line.split())
    except SystemExit as error:
        status = int(str(error.code))
    told = capsys.readouterr()
    assert status == 2
    assert not told.out
    assert way_out in told.err
    assert len(told.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ('faults=[{at_s=1e5,kind="replica_crash",replica=0}]', "was never reached: the run ended"),
        (
            'faults=[{at_s=0.2,kind="replica_crash",replica=0},'
            '{at_s=0.21,kind="replica_crash",replica=0}]',
            "the replica_crash at 0.21 s struck nothing: replica 0 is down already",
        ),
        ("autoscale.preset=hpa", "nothing to add: no replica is inactive; declare [[replicas]]"),
        (
            'faults=[{at_s=0.2,kind="link_down",node=0,duration_s=1}]',
            "the link_down at 0.2 s slowed nothing: no KV or weights crossed the network",
        ),
        (
            'faults=[{at_s=0.2,kind="load_stuck",replica=0,duration_s=1}]',
            "the load_stuck at 0.2 s struck nothing: no transfer that it could befall began",
        ),
        (
            'faults=[{at_s=0.2,kind="overload",duration_s=1,factor=1.2}]',
            "the overload at 0.2 s changed nothing: a factor of 1.2 is rounded to 1",
        ),
        (
            'faults=[{at_s=0.2,kind="host_cache_lost",node=0}]',
            "the host_cache_lost at 0.2 s lost nothing: no KV tier or scaler uses that memory",
        ),
        ('replicas=[{count=1},{role="inactive",count=1}]', "1 replica is inactive to the end"),
        ("router.decode_policy=least_used", "chooses nothing: no replica decodes"),
        ("router.policy=prefix_aware", "nothing to go by: no prompts share a prefix"),
        ("workload={path='good.csv',limit=9}", "workload.limit = 9, and good.csv has 2 requests"),
        ("router.policy=lora_affinity", "nothing to go by: no request names an adapter"),
    ],
)
def test_what_has_no_effect_is_told(
    setting: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN.split(), setting]) == 0
    assert told in capsys.readouterr().err


def test_an_impossible_objective_is_refused_with_the_time_of_a_pass(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{PLAN} --tpot-p95 1ms".split()) == 3
    assert "a step of one request alone takes" in capsys.readouterr().err


def test_the_name_of_a_checkpoint_says_its_weights(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "base.toml", "--set", "model.name=Qwen/Qwen3-32B-FP8"]) == 0
    assert "fp8" in capsys.readouterr().out
