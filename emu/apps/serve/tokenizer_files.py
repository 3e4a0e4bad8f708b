"""The built-in tokenizer as a Hugging Face directory of a few kB.

Clients that insist on a tokenizer load it without a network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

END_OF_TEXT: Final = "<|endoftext|>"


def _byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return alphabet


def write_tokenizer(directory: Path, max_model_tokens: int) -> None:
    """The built-in tokenizer as `tokenizer.json`, `tokenizer_config.json` and `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = _byte_alphabet()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {alphabet[byte]: byte for byte in range(256)},
        "merges": [],
    }
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 256, "content": END_OF_TEXT, **special, "special": True}],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": False},
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": max_model_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}"
            "{% endif %}{{ message['content'] }}{% endfor %}",
        },
        "config.json": {
            "model_type": "gpt2",
            "vocab_size": 257,
            "n_positions": max_model_tokens,
            "bos_token_id": 256,
            "eos_token_id": 256,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
