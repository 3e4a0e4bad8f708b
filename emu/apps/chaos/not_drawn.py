"""Keys of the schema that no world has, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.features.registry import all_features

_OUTSIDE: Final = "names a file from outside, which no seed can make"
_TRIAL: Final = "the trial says itself what is written, for its judge"
_PROGRAM: Final = "speaks to a program from outside, or keeps what it said"
_WHOLE: Final = "the engine is drawn for the whole world"
_OWN: Final = "keys of a class of the user's own"
_ONE: Final = "has a single word; any other is a class of the user's own"
NOT_DRAWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("model.hf_config", "model.assume", "models.hf_config", "models.assume"),
                *("workload.path", "workload.columns", "workload.tokenizer"),
                *("workload.turns", "workload.think_s"),  # of the format sharegpt
                *("workload.synthetic.prompt.path", "workload.synthetic.output.path"),
                *("latency.path", "latency.hardware", "latency.tables"),
                *("latency.backend=profile", "latency.backend=vidur"),
                *("latency.backend=aiconfigurator", "engine.learned"),
            ),
            _OUTSIDE,
        ),
        **dict.fromkeys(
            (
                *("output.dir", "output.trace", "output.trace_events_max", "output.report"),
                *("output.timeseries_interval_ms", "output.events", "output.heartbeat_s"),
            ),
            _TRIAL,
        ),
        **dict.fromkeys(
            (
                *("latency.binary", "latency.dialect", "latency.timeout_s"),
                *("latency.cache", "latency.replay"),
            ),
            _PROGRAM,
        ),
        **dict.fromkeys(("replicas.engine", "models.engine"), _WHOLE),
        **dict.fromkeys(("router.admission", "migration.policy"), _ONE),
        **dict.fromkeys(
            (
                *("router.admission_own", "router.decode_policy_own", "migration.own"),
                "latency.expert_routing_own",
            ),
            _OWN,
        ),
        "scheduler.leap": "each world runs with leaps and without; the trial compares the two",
        **{key: why for feature in all_features() for key, why in feature.undrawn.items()},
    }
)
"""Keys that no drawn world has, and why. Worlds' own lines are written where `path` says."""
