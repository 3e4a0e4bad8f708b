"""A feature is its module and its line: without both, all else works."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from emu.config.features import FEATURES
from tests.features.removal import NAMES, ROOT, SAMPLE, failing, problems, without

QUICK = ("tests/features/test_registry.py", "tests/features/test_matrix.py")
COMMON = frozenset({"eviction"})
"""Keys that are those of other tables too."""

NAMED_IN_MAX = {
    "speculation": (r"[Ss]peculati", 3),
    "lora": (r"LoRA|[a-z]_loras?\b|lora_(?!rank)|\badapters\b|[.\"]adapter\b", 12),
    "images": (r"\bimages\b|mm_per_prompt|vision tower", 11),
    "skip_prefill": (r"skip_prefill", 3),
    "retention": (r"retain_s", 0),
    "eviction": (r"scheduler\.eviction|own eviction", 1),
    "guided_decoding": (r"guided_share|guided_token_us", 0),
}
"""What a feature is called in the sources, and in how many files besides its own. Only shrinks.

Not counted: what clients may say on the wire and files of workloads in their formats, and the judges
of random worlds, which share nothing with the code that they judge.
"""
APART = (
    *("emu/apps/serve/", "emu/apps/chaos/truth/"),
    *("emu/workload/formats/", "emu/workload/logs/"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_needs_a_feature(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    without(name, copy)
    assert problems(copy, SAMPLE) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["lora", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("images", "speculation"))],
)
def test_without_a_feature_the_registry_is_whole(name: str, tmp_path: Path) -> None:
    """The quick form: what the registry, its matrix and the layers say in a copy without it."""
    copy = tmp_path / "tree"
    without(name, copy)
    assert failing(copy, QUICK) == ""


def test_the_sample_exists() -> None:
    assert all((ROOT / path).exists() for path in (*SAMPLE, *QUICK))


@pytest.mark.parametrize("name", NAMES)
def test_no_module_imports_a_feature(name: str) -> None:
    """What is asked of all is in `base.py`, and bound by the registry."""
    own = ROOT / "emu" / "features" / name
    imports = re.compile(rf"emu\.features(\.{name}\b| import .*\b{name}\b)")
    found = [
        path
        for path in sorted((ROOT / "emu").rglob("*.py"))
        if path != own.with_suffix(".py")
        and own not in path.parents
        and path != ROOT / "emu" / "config" / "features.py"
        and imports.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


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
    naming = [p for p in naming if p != "emu/config/features.py" and not p.startswith(APART)]
    if len(FEATURES) < len(NAMED_IN_MAX):
        return  # a copy without a feature, which may have named this one
    assert len(naming) == most, f"{len(naming)} files; only lower the bound: {naming}"


@pytest.mark.parametrize("name", NAMES)
def test_what_sets_a_key_of_a_feature_goes_with_it(name: str) -> None:
    """Tests of it stand in `tests/features`; other files that have its keys are in its `files`."""
    feature = importlib.import_module(f"emu.features.{name}").FEATURE
    keys = {key for _, its in feature.keys for key in its.__struct_fields__} - COMMON
    sets = re.compile(rf"(?<![\w.])\"?({'|'.join(sorted(keys))})\"?\]?\s*[:=]")
    found = [
        path
        for folder, ending in (("tests", "*.py"), ("tests/corpus", "*.toml"), ("configs", "*.toml"))
        for path in sorted((ROOT / folder).rglob(ending))
        if ROOT / "tests" / "features" not in path.parents
        and sets.search(path.read_text(encoding="utf-8"))
    ]
    assert {str(path.relative_to(ROOT)) for path in found} <= set(feature.files)
