"""Looks keys of a `config.json` up under any of their names and judges their values.

Owns nothing but the configuration being read and where it came from. Every complaint is an
`InputError` that names the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

from emu.errors import InputError

# The first name found counts.
HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "model_dim")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
POSITIONS: Final = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
VOCAB: Final = ("vocab_size", "padded_vocab_size")

_COUNT_MAX = 1 << 40
_LAYERS_MAX = 10_000

HfConfig: TypeAlias = Mapping[str, object]
"""A Hugging Face `config.json`, or a table in it, as it was parsed."""


class ConfigReader:
    """The keys of one model's configuration."""

    def __init__(self, config: HfConfig, source: str) -> None:
        self.config = config
        self.source = source

    def problem(self, field: str, problem: str) -> InputError:
        """The error to raise about one key."""
        return InputError(self.source, None, field, problem)

    def optional(self, *names: str) -> int | None:
        """The first of these keys that is given; None if none is.

        A list with one value for each layer counts as that value if all are equal, and is refused
        otherwise: a model whose layers differ needs a rule of its own.
        """
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, list):
                if not value or any(entry != value[0] for entry in value):
                    raise self.problem(name, "differs from layer to layer, which emu cannot read")
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.problem(name, f"expected a whole number, got {value!r}")
            if not 0 <= value <= _COUNT_MAX:
                raise self.problem(name, f"{value} is out of range")
            return value
        return None

    def required(self, *names: str) -> int:
        """The first of these keys that is given; it must be there and positive."""
        value = self.optional(*names)
        if value is None:
            also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.problem(names[0], f"the key is missing{also}")
        if value == 0:
            raise self.problem(names[0], "must not be 0")
        return value

    @property
    def hidden(self) -> int:
        """Width of what passes from layer to layer."""
        return self.required(*HIDDEN)

    @property
    def layers(self) -> int:
        """The number of layers, each of which is looked at: no more than models have."""
        value = self.required(*LAYERS)
        if value > _LAYERS_MAX:
            raise self.problem(LAYERS[0], f"{value} is out of range: at most {_LAYERS_MAX:,}")
        return value

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.required(*HEADS)

    @property
    def max_position(self) -> int:
        """Tokens of the longest sequence."""
        return self.optional(*POSITIONS) or 2048

    @property
    def vocab(self) -> int:
        """Entries of the vocabulary."""
        return self.required(*VOCAB)

    def get(self, name: str, default: object = None) -> object:
        """A key of any type; `default` where it is absent or null."""
        value = self.config.get(name)
        return default if value is None else value

    def listed(self, name: str, length: int, allowed: Collection[object]) -> list[object] | None:
        """A list with one entry for each layer, each of a known value; None where absent.

        `length` is the number of layers.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.problem(name, f"expected a list, got {value!r}")
        if len(value) != length:
            raise self.problem(name, f"{len(value)} entries for {length} layers")
        for entry in value:
            if not isinstance(entry, (str, int)) or entry not in allowed:
                known = ", ".join(str(key) for key in allowed)
                raise self.problem(name, f"unknown kind of layer {entry!r} (known: {known})")
        return value

    def table(self, name: str) -> HfConfig:
        """A table of keys; empty where absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.problem(name, f"expected a table, got {value!r}")
        return value

    def entries(self, name: str) -> Sequence[object]:
        """A list, or the letters of a word; empty where absent."""
        value = self.get(name, ())
        if not isinstance(value, list | str | tuple):
            raise self.problem(name, f"expected a list, got {value!r}")
        return value

    def indices(self, name: str) -> set[int]:
        """A list of whole numbers as a set; empty where absent."""
        found = {entry for entry in self.entries(name) if isinstance(entry, int)}
        if len(found) < len(set(self.entries(name))):
            raise self.problem(name, "expected whole numbers")
        return found
