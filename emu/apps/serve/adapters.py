"""LoRA adapters that are loaded and unloaded while the server runs.

Adapters of a configuration with `scheduler.enable_lora` have slots and KV of their own, and the
first step that runs one loads it. Without that they are names on the server's own port, which
cost no memory and no time, and the ports of a fleet have none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import (
    PlainTextResponse,
    Response,
)

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import NAME_MAX
from emu.apps.serve.operations import TEXT, Access, Handler, Operation
from emu.apps.serve.service import ADAPTER_NAMES_MAX, ADAPTERS_MAX, Service


class AdapterBody(Struct, kw_only=True):
    """`/v1/load_lora_adapter`, `/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    lora_path: Annotated[str, Meta(max_length=4096)] = ""
    load_inplace: bool | None = False


def adapter_operations(load: Handler, unload: Handler, access: Access) -> list[Operation]:
    """The two calls, for callers that `access` admits."""
    path = "POST /v1/{}_lora_adapter"
    added, removed = "Add an adapter", "Remove an adapter"
    calls: list[tuple[str, Handler, str, tuple[int, ...]]] = [
        (path.format("load"), load, added, (400,)),
        (path.format("unload"), unload, removed, (400, 404)),
    ]
    return [
        Operation(call, handler, text, AdapterBody, kind=TEXT, statuses=errors, access=access)
        for call, handler, text, errors in calls
    ]


def load_adapter(
    service: Service, adapters: dict[str, str], body: AdapterBody, known: Collection[str]
) -> Response:
    """Add an adapter to those of the server or of a port, where `known` ones are there already.

    Raises ApiError, in vLLM's words.
    """
    name = body.lora_name
    if not body.lora_path:
        raise ApiError(400, "lora_path is missing", param="lora_path")
    if name in service.model_names or (name in known and not body.load_inplace):
        problem = f"The lora adapter '{name}' has already been loaded."
        raise ApiError(400, problem, type="InvalidUserInput")
    if len(adapters) >= ADAPTERS_MAX and name not in adapters:
        raise ApiError(400, f"at most {ADAPTERS_MAX} adapters", type="InvalidUserInput")
    if len(service.adapters.numbers) >= ADAPTER_NAMES_MAX and name not in service.adapters.numbers:
        problem = f"at most {ADAPTER_NAMES_MAX} names of adapters in a session"
        raise ApiError(400, problem, type="InvalidUserInput")
    adapters[name] = body.lora_path
    service.adapters.numbers.setdefault(name, len(service.adapters.numbers) + 1)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def unload_adapter(adapters: dict[str, str], body: AdapterBody) -> Response:
    """Take it away; requests that have begun with it go on. Raises ApiError."""
    name = body.lora_name
    if adapters.pop(name, None) is None:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.", type="NotFoundError")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
