"""What aiconfigurator's generator starts servers with, for the rows that were measured with it.

Owns its rules of limits (github.com/ai-dynamo/aiconfigurator, `src/aiconfigurator/generator`, from
`rule_plugin/*.rule` and the templates of each version): NVIDIA's rows beside InferenceX's name the
versions that it has templates for, and the numbers of clients that its benchmark goes through.
"""

from __future__ import annotations

from typing import Final

from emu.apps.fidelity.points.table import Point

Keys = dict[str, int | float | bool | str]

_SOURCE: Final = "nvidia-aic"
_SEQUENCES: Final = 128
"""`max_batch_size` where nothing is said; more clients are taken to have been told."""
_MORE_TOKENS: Final = 1500
"""Tokens of a step beyond one prompt and a token of each sequence."""
_BLOCK_TOKENS: Final = 32
_MIXES: Final = "0.5.6"
"""Since then its templates mix decodes into SGLang's prefill batches, and limit these."""
_FRACTION: Final = 0.8
"""`mem_fraction_static` of its SGLang files since 0.5.8, as of its files for TensorRT-LLM. No file
of that day says so; the six rows do (one server): with the engine's own 0.835 their first tokens
come after a tenth to a third of the measured 7 to 89 s, and with this the three of 1,024 tokens, by
which it was found, are within 20 %, those of 2,048 within 1, 4 and 37 %; tokens within 6 % all."""
_FRACTION_SINCE: Final = "0.5.8"


def is_configured(point: Point) -> bool:
    """Whether one server was started with its files."""
    return point.source.startswith(_SOURCE) and len(point.servers) == 1


def configured_keys(point: Point) -> Keys:
    """Keys of the scheduler: no prefix is reused, and a step has hardly more than one prompt."""
    sequences = max(_SEQUENCES, point.clients)
    if point.engine == "sglang":
        return _sglang(point, sequences)
    tokens = sequences + point.prompt_tokens + _MORE_TOKENS
    if point.engine == "vllm":
        return {
            "prefix_caching": False,
            "max_num_batched_tokens": tokens,
            "max_num_seqs": sequences,
        }
    return {
        "enable_block_reuse": False,
        "cuda_graph_padding": True,  # every size is captured
        "cuda_graph_max_batch_size": sequences,
        "max_batch_size": sequences,
        "max_num_tokens": -(-tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS,
        "free_gpu_memory_fraction": 0.8,
    }


def _sglang(point: Point, sequences: int) -> Keys:
    keys: Keys = {
        "disable_radix_cache": True,
        "ignore_eos": True,
        "max_running_requests": sequences,
        "cuda_graph_max_bs": sequences,  # every size up to there is listed
    }
    if point.version < _MIXES:
        return keys | {"chunked_prefill_size": -1}
    keys |= {
        "enable_mixed_chunk": True,
        "max_prefill_tokens": point.prompt_tokens + _MORE_TOKENS,
    }
    if point.version >= _FRACTION_SINCE:
        keys["mem_fraction_static"] = _FRACTION
    return keys
