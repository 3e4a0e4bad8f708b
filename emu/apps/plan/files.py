"""The best cluster as files (the survivor, where one was asked for): how to run and deploy it.

    cluster.toml        `emu run cluster.toml` repeats the run that the plan rests on
    vllm.txt            one `vllm serve` command for each role
    kubernetes.yaml     a Deployment and a Service for each role
    dynamo.yaml         a DynamoGraphDeployment
    llm-d.yaml          values for the chart llm-d-modelservice
    plan.json           the answer

These stand in the directory of the plan.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from emu.apps.plan.answer import Answer
from emu.apps.plan.flags import checkpoint, roles_of
from emu.apps.plan.manifests.dynamo import dynamo
from emu.apps.plan.manifests.kubernetes import kubernetes
from emu.apps.plan.manifests.llm_d import llm_d
from emu.config.load import config_from_dict
from emu.config.names import toml_text
from emu.config.schema import VllmTable
from emu.report.atomic import write_text


def write_answer(answer: Answer, directory: Path) -> list[Path]:
    """Write all files; their paths."""
    chosen = answer.survivor or answer.rows[0]
    files = {
        "cluster.toml": f"# {chosen.label}; found by emu plan.\n{toml_text(answer.config)}",
        "plan.json": msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n",
    }
    config = config_from_dict(answer.config)
    if isinstance(config.scheduler, VllmTable):
        roles = roles_of(config)
        lines = [f"# {one.role}, {one.numbers} of them\n{shlex.join(one.flags)}\n" for one in roles]
        files["vllm.txt"] = f"# {checkpoint(config.model, answer)}\n" + "\n".join(lines)
        files["kubernetes.yaml"] = kubernetes(config, roles, answer.model)
        files["dynamo.yaml"] = dynamo(roles, answer.model)
        files["llm-d.yaml"] = llm_d(roles, answer.model)
    for name, text in files.items():
        write_text(directory / name, text)
    return [directory / name for name in files]
