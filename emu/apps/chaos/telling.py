"""What a verdict means to the user: whose fault it is, in words to act on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final

import msgspec
from rich.console import Console

from emu.apps.chaos.trial import REFUSED, Verdict
from emu.config.load import effective_dict
from emu.config.schema import Config, LimitsTable
from emu.runs.inputs import named_plugins

TOLD_EVERY_S: Final = 10.0
_PROBLEMS_MAX: Final = 5
_STORY_MAX: Final = 40


class Blame(Enum):
    """Where the cause of a violation is to be looked for."""

    EMU = "emu"
    OWN_CLASS = "own class"
    """A class of the user's own takes part; emu may be right."""
    LIMIT = "limit"
    """The run reached a limit that the user set."""


class Owner(msgspec.Struct, frozen=True):
    """What of a user's configuration can be the cause; nothing in drawn worlds."""

    classes: Sequence[str] = ()
    """Classes of the user's own that take part."""
    limits: Sequence[str] = ()
    """Errors of a run that a limit of the user's own can cause."""


def owner_of(config: Config) -> Owner:
    """What of a configuration can be the cause of a violation."""
    classes = dict.fromkeys(table[key] for table, key in named_plugins(effective_dict(config)))
    limits, usual = config.limits, LimitsTable()
    found = ["LimitReached"]
    if limits.stalled_s != usual.stalled_s:
        found.append("Stalled")
    if limits.events_per_instant != usual.events_per_instant:
        found.append("Zeno")
    return Owner(tuple(classes), tuple(found))


def blame_of(verdict: Verdict, owner: Owner) -> Blame:
    """Where to look for the cause of what a verdict found.

    emu itself, unless a class of the user's own takes part, or every problem is a limit of theirs.
    """
    if owner.classes:
        return Blame.OWN_CLASS
    if all(problem.partition(":")[0] in owner.limits for problem in verdict.problems):
        return Blame.LIMIT
    return Blame.EMU


_MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "I1": "every request is found exactly once",
        "I2": "every request ends exactly once",
        "I3": "a completed request has exactly its tokens",
        "I4": "KV blocks are held by what uses them",
        "I5": "tokens come from where the KV is",
        "I6": "each request has one owner",
        "I7": "replicas change state as the table of states says",
        "I8": "locks agree with states and transfers",
        "I9": "time never goes back",
        "I11": "links carry no more than they can",
        "I12": "no replica is idle while a request waits that it can serve",
        "I14": "GPUs and plans: one owner each, within the bounds of [autoscale]",
        "I17": "the results say what happened",
        "T1": "faults strike as they were asked for",
        "T2": "iterations take what their members cost",
        "T3": "transfers take what links allow",
        "T4": "summary.json and requests.csv follow from what happened",
        "T5": "schedulers and routers choose by their rules",
        "T6": "planners, retries and deadlines keep their rules",
        "leap": "the same bytes with and without decode leaps",
        "untyped": "no exception but emu's own",
        "Deadlock": "a run never stands still with requests in it",
        "Stalled": "a run never goes on without progress",
        "Zeno": "time goes on",
        REFUSED: "a world that is drawn is a valid one",
    }
)
"""What holds when there is no such problem, by the first word of the problem."""
_WORD: Final = re.compile(
    r"^(?:at the end: |InvariantViolation: (?:at \d+ ns: )?)*([\w ]+?)(?=:| )"
)


def broken_rules(problems: Sequence[str]) -> list[str]:
    """The rules that these problems break, in words, each once."""
    found: dict[str, None] = {}
    for problem in problems:
        match = _WORD.match(problem)
        word = REFUSED if problem.startswith(REFUSED) else match[1] if match else ""
        if word in _MEANINGS:
            found[f"{word}: {_MEANINGS[word]}"] = None
    return list(found)


def tell(verdict: Verdict, console: Console, owner: Owner | None = None) -> Blame:
    """A failing seed: what is wrong, whose fault it is, and the story of all that took part.

    `owner`: of a user's configuration; None in a drawn world.
    """
    owner = owner or Owner()
    blame = blame_of(verdict, owner)
    head = f"seed {verdict.seed}: {_head(verdict, blame, owner)}"
    console.print(head, style="bold red", soft_wrap=True, markup=False)
    problems = list(dict.fromkeys(verdict.problems))  # both runs of a world tell most of them
    for problem in problems[:_PROBLEMS_MAX]:
        console.print(f"  {problem}", soft_wrap=True, markup=False)
    if len(problems) > _PROBLEMS_MAX:
        console.print(f"  and {len(problems) - _PROBLEMS_MAX} more")
    for line in verdict.story[:_STORY_MAX]:
        console.print(f"    {line}", soft_wrap=True, markup=False)
    if blame is not Blame.LIMIT:
        for rule in broken_rules(verdict.problems):
            console.print(f"  should hold: {rule}", soft_wrap=True, markup=False)
    return blame


def _head(verdict: Verdict, blame: Blame, owner: Owner) -> str:
    if blame is Blame.LIMIT:
        return "the run reached a limit of your [limits] under these faults"
    if blame is Blame.OWN_CLASS:
        names = ", ".join(owner.classes)
        if any(problem.startswith("PluginError") for problem in verdict.problems):
            return f"a class of your own failed ({names})"
        return f"what emu promises does not hold, and classes of your own take part ({names})"
    return "emu is wrong: what it promises does not hold"


def advice(blame: Blame, file: str) -> str:
    """What to do about it; `file`: where the world was written."""
    if blame is Blame.LIMIT:
        return "raise the limit, or take it as the answer: the cluster does not end in time"
    if blame is Blame.OWN_CLASS:
        return "look there first; if it happens without them too, report it with " + file
    return f"your configuration is not the cause; please report it with {file}"
