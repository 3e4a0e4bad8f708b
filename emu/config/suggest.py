"""Nearest known words: "did you mean ...?" for keys and values. Pure, deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that resembles `word` most, or an empty string if none does.

    `cutoff` is the least likeness, 0 to 1.
    """
    words = sorted(known)
    folded = word.casefold().replace("-", "_")
    for candidate in words:
        if candidate.casefold().replace("-", "_") == folded:
            return candidate
    # The same words in another order: ttft_p95_ms means p95_ttft_ms.
    parts = sorted(folded.split("_"))
    for candidate in words:
        if sorted(candidate.casefold().replace("-", "_").split("_")) == parts:
            return candidate
    import difflib  # only after a mistake

    matches = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What is appended to a problem; nothing if no known word resembles this one."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def unknown_key(key: str, here: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """The problem text for a key that its table does not have.

    `here` are the table's keys, `elsewhere` maps key names of other tables to their dotted path.
    A slip of one letter in the right table is likelier than the right key in the wrong table,
    and that is likelier than a vague resemblance.
    """
    near = nearest(key, here, cutoff=0.8)
    if key in elsewhere and not near:
        return f"unknown key; did you mean {elsewhere[key]}?"
    near = near or nearest(key, here)
    if near:
        return f"unknown key; did you mean {near}?"
    far = nearest(key, elsewhere, cutoff=0.8)
    if far:
        return f"unknown key; did you mean {elsewhere[far]}?"
    if not here:
        return "unknown key"
    return f"unknown key; known keys are {', '.join(here)}"


def unknown_value(value: str, known: Sequence[str], what: str = "expected one of") -> str:
    """The problem text for a word that is not among the known ones."""
    return f'{what} {", ".join(known)}; got "{value}"{did_you_mean(value, known)}'
