"""`emu plan`: the answer in words, or its file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from emu.apps.plan.options import PlanCommand
from emu.apps.plan.page import PAGE
from emu.apps.plan.plan import planned
from emu.apps.plan.words import chosen_text, lines_of
from emu.apps.shared.answer import Reply, progress, tell


def plan_command(options: PlanCommand) -> int:
    """Say what arithmetic knows, search, write the files, tell what was found."""

    def say(line: str) -> None:
        if not (options.quiet or options.as_json):
            print(line, flush=True)

    with progress(options, "runs") as watch:
        answer = planned(options, watch, say)
    directory = Path(options.output)

    def show(console: Console) -> None:
        for line in lines_of(answer):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        files = sorted(path.name for path in directory.iterdir() if path.is_file())
        named = ", ".join(name for name in files if name != PAGE)
        told = f"{answer.runs} runs; page: {directory / PAGE}; of {chosen_text(answer)}: {named}"
        console.print(told, soft_wrap=True, highlight=False, markup=False)

    return tell(Reply(show, directory / "plan.json"), options)
