"""From a configuration to a plan and its requests: what a run needs before it begins.

Everything that can be wrong with the input is found here, before any emulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from emu.cluster.commands import check_commands
from emu.cluster.plan import Plan, ReplicaPlan, make_plan
from emu.config.fleet import is_scaled
from emu.config.places import placing
from emu.config.schema import Config, WorkloadTable
from emu.errors import InputError
from emu.workload.opened import Facts, Workload, open_workload


def prepare(config: Config, source: str, *, imports: bool = True) -> tuple[Plan, Workload]:
    """Everything that can be wrong is found here, before any emulation.

    `imports`: classes of a user's own are loaded (their code runs); else only looked for.
    """
    with placing(source):
        plan = make_plan(config, source, imports=imports)
        is_named = len(plan.models) > 1 or bool(config.model.served_name)
        asked = {"models": config.workload.models, "model_shares": config.workload.model_shares}
        for key, given in asked.items():
            if given and not is_named:
                problem = "means nothing with one model that has no served_name"
                raise InputError(source, None, f"workload.{key}", problem)
        workload = open_workload(
            _lenient(config.workload),
            base_dir=Path(),
            seed=config.seed,
            holds=holds_for(plan),
            config_source=source,
            models=plan.models if is_named else (),
            default_model=plan.default_model,
        )
        check_commands(config.commands, len(plan.replicas), source)
        if workload.facts.asks:
            check_asked(workload.facts, plan.replicas, source)
    if workload.facts.names_models and not is_named:
        workload.notes.warn("`model` of a request is not compared: one model is served")
    if config.power is not None:
        from emu.cluster.energy import energy_warnings  # most runs do not model it

        for warning in energy_warnings(config.power, plan):
            workload.notes.warn(warning)
    if is_scaled(config.autoscale):
        for warning in scaling_warnings(plan):
            workload.notes.warn(warning)
    return plan, workload


def scaling_warnings(plan: Plan) -> list[str]:
    """A line on models of which no replica waits to be loaded: their planner can only shrink."""
    full = [
        name
        for name, replicas in plan.replicas_of_models.items()
        if not any(replica.role == "inactive" for replica in replicas)
    ]
    if not full:
        return []
    whose = "" if len(plan.models) == 1 else f" of {', '.join(full[:3])}"
    rest = f" and {len(full) - 3} other models" if len(full) > 3 else ""
    what = f"no replica{whose}{rest} is inactive"
    return [f'autoscale: nothing to add: {what}; declare [[replicas]] with role = "inactive"']


def check_asked(facts: Facts, replicas: Sequence[ReplicaPlan], source: str) -> None:
    """Every replica serves what requests ask of features. InputError names the key."""
    from emu.features.registry import all_features  # most requests ask for nothing

    features = all_features()
    for ask in facts.asks:
        if not any(ask in feature.serves for feature in features):
            problem = f"requests ask for an {ask}, which no feature of this emulator serves"
            raise InputError(source, None, "workload", problem)
    for feature in features:
        feature.check_workload(facts, replicas, source)


def _lenient(table: WorkloadTable) -> WorkloadTable:
    """The workload that stands in where none is given is no mistake: it is cut to the model."""
    made = table.synthetic
    if made is not None and table == type(table)(synthetic=type(made)()):
        return msgspec.structs.replace(table, oversized="clip")
    return table


def holds_for(plan: Plan) -> Callable[[int, int], str]:
    """(prompt, output) -> why no replica could ever serve such a request, or empty.

    One rule for both limits of a replica: the tokens of its KV pool, and its model's context.
    """
    plain = [r for r in plan.replicas if r.kv_layout is None]
    hybrid = [r for r in plan.replicas if r.kv_layout is not None]
    tokens = max((r.num_blocks * r.scheduler.block_size for r in plain), default=0)
    longest = max(r.max_model_tokens for r in plan.replicas)

    def holds(prompt_tokens: int, output_tokens: int) -> str:
        size = prompt_tokens + output_tokens
        if size > longest:
            return f"the model reads {longest} tokens at most"
        if size > tokens and not any(replica.can_hold(size) for replica in hybrid):
            if hybrid:
                return "no replica has KV blocks enough for all groups of layers"
            return f"the largest replica holds {tokens} tokens of KV cache"
        return ""

    return holds
