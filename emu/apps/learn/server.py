"""A server in words as a configuration."""

from __future__ import annotations

import json

import msgspec

from emu.apps.learn.options import ServerOptions
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.documents import Document
from emu.engines.registry import engine_named
from emu.errors import InputError


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What served, in the words of a configuration; None or empty = its default."""

    model: str = ""
    gpu: str = ""
    tensor_parallel: int = 1
    dtype: str = ""
    engine: str = ""
    scheduler: Document = {}
    """Keys of `[scheduler]`."""
    max_model_tokens: int = 0

    def text(self, source: str) -> str:
        """The configuration without its workload. Raises InputError for what is lacking."""
        for value, option in ((self.model, "--model"), (self.gpu, "--gpu")):
            if not value:
                problem = "the data do not say it; give it here, or a configuration with --config"
                raise InputError(source, None, option, problem)
        model = lookup_model(self.model, source, "--model")
        gpu = lookup_gpu(self.gpu, source, "--gpu")
        lines = ["[model]", f"name = {json.dumps(model.name)}"]
        if self.dtype:
            lines.append(f"dtype = {json.dumps(self.dtype)}")
        if self.max_model_tokens:
            lines.append(f"max_model_tokens = {self.max_model_tokens}")
        lines += ["", "[[nodes]]", f"gpu = {json.dumps(gpu.name)}", "gpus = 8"]
        lines += ["", "[[replicas]]", f"tensor_parallel = {self.tensor_parallel}"]
        if self.scheduler:
            lines += ["", "[scheduler]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in self.scheduler.items()]
        if self.engine:
            lines += ["", "[engine]", *_engine_lines(self.engine, source)]
        return "\n".join(lines) + "\n"


def _engine_lines(engine: str, source: str) -> list[str]:
    """Keys of `[engine]`: a file of constants, or an engine as any program spells it."""
    if engine.endswith(".toml"):
        return [f"learned = {json.dumps(engine)}"]
    found = engine_named(engine, source, "--engine")
    return [f"name = {json.dumps(found.name)}", f"version = {json.dumps(found.version)}"]


def server_of(options: ServerOptions) -> Server:
    """The server that the options describe."""
    return Server(
        model=options.model,
        gpu=options.gpu,
        tensor_parallel=options.tensor_parallel,
        dtype=options.dtype,
        engine=options.engine,
        scheduler=options.scheduler,
        max_model_tokens=options.max_model_len,
    )
