"""A feature is its module and its line: without both, all else works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emu.config.features import FEATURES
from tests.features.removal import NAMES, ROOT, SAMPLE, problems, without

CORE = ("tests/features", "tests/config", "tests/test_layers.py")

NAMED_IN_MAX = {
    "speculation": (r"[Ss]peculati", 2),
    "lora": (r"LoRA|[a-z]_loras?\b|lora_(?!rank)|\badapters\b|[.\"]adapter\b", 27),
    "images": (r"\bimages\b|mm_per_prompt|vision tower", 14),
    "skip_prefill": (r"skip_prefill", 4),
    "retention": (r"retain_s", 0),
    "eviction": (r"scheduler\.eviction|own eviction", 1),
    "guided_decoding": (r"guided_share|guided_token_us", 0),
}
"""What a feature is called in the sources, and in how many files besides its own. Only shrinks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_needs_a_feature(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    without(name, copy)
    assert problems(copy, checks_types=False, tests=CORE) == ""


def test_the_sample_exists() -> None:
    assert all((ROOT / path).exists() for path in (*SAMPLE, *CORE))


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_is_named_in_few_files(name: str) -> None:
    pattern, most = NAMED_IN_MAX[name]
    own = ROOT / "emu" / "features" / name
    naming = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "emu").rglob("*.py"))
        if path != own.with_suffix(".py")
        and own not in path.parents
        and re.search(pattern, path.read_text(encoding="utf-8"))
    ]
    naming = [path for path in naming if path != "emu/config/features.py"]
    if len(FEATURES) < len(NAMED_IN_MAX):
        return  # a copy without a feature, which may have named this one
    assert len(naming) == most, f"{len(naming)} files; only lower the bound: {naming}"
