"""What `emu learn` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option
from emu.options.shared import Jobs, Settings, Shown, output


class ServerOptions(Settings):
    """What served, in the words of a configuration; empty and 0 = its default."""

    config: Annotated[
        Path | None,
        Option("A configuration of the server, instead of the options that describe it."),
    ] = None
    model: Annotated[str, Option("What was served, if the data do not say it.")] = ""
    gpu: Annotated[str, Option("On which GPU.")] = ""
    tensor_parallel: Annotated[int, Option("GPUs of one replica.", "--tensor-parallel", "--tp")] = 1
    dtype: Annotated[str, Option("Weights, as model.dtype; empty = the model's own.")] = ""
    engine: Annotated[
        str,
        Option(
            "The engine to start from (vllm-0.15, or a FILE.toml); empty = as the server says,"
            " else the default."
        ),
    ] = ""
    max_num_seqs: Annotated[int, Option("The server's limit; 0 = vLLM's default.", at_least=0)] = 0
    max_num_batched_tokens: Annotated[int, Option("Likewise.", at_least=0)] = 0
    max_model_len: Annotated[int, Option("Likewise.", at_least=0)] = 0
    gpu_memory_utilization: Annotated[float, Option("Likewise.")] = 0.0
    server: Annotated[
        str,
        Option(
            "Address of the server: its /version, /v1/models and /metrics say what options do not."
        ),
    ] = ""

    @property
    def scheduler(self) -> dict[str, int | float]:
        """Keys of `[scheduler]` that are given."""
        limits = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        return {key: value for key, value in limits.items() if value}


class LearnOptions(ServerOptions, Jobs, Shown):
    """Results of benchmarks or a live server, what served, and where the file goes."""

    command = "learn"

    sources: Annotated[
        Sequence[str],
        Argument(
            "The address of a server that does nothing else (http://...: it is driven through a"
            " probe of about three minutes), or results with single requests: vllm bench serve"
            " --save-detailed, SGLang's bench_serving --output-details, GuideLLM, AIPerf,"
            " inference-perf, emu observe."
        ),
    ]
    shared_prefix: Annotated[int, Option("Tokens that all prompts begin with.", at_least=0)] = 0
    skip: Annotated[Sequence[str], Option("Load levels to leave out, by their names.")] = ()
    name: Annotated[str, Option("Of the file; empty = that of the data.")] = ""
    date: Annotated[str, Option("Of the measurement, where the data do not say it.")] = ""
    api_key: Annotated[str, Option("Of a live server.")] = ""
    speed: Annotated[float, Option("Emulated seconds a second, of `emu serve --speed`.")] = 1.0
    probe_s: Annotated[float, Option("Time of the probe.", at_least=0)] = 180.0
    probe_sequences: Annotated[int, Option("Requests at once, at most.", at_least=1)] = 256
    output: Annotated[Path, output("Where the file goes.")] = Path("learned")
