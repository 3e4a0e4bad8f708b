"""Commands about logs: what else could have been done, and a run as a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.options import Jobs, Json, Overrides, Parameter, Quiet, Seed


def whatif(
    log: Path,
    config: Path,
    /,
    *,
    try_: Annotated[tuple[str, ...], Parameter(name="--try", metavar="KEY=VALUE[,KEY=VALUE]")] = (),
    servers: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = (),
    metric: Literal["e2e", "ttft"] = "e2e",
    decisions: Annotated[int, Parameter(metavar="N")] = 40,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/whatif"),
    set_: Overrides = (),
    seed: Seed = 0,
    jobs: Jobs = 0,
    ray: str | None = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Replay the log of a real server, and see what another choice would have given.

    Prints how far recorded and emulated latencies are apart; the difference that each alternative
    makes, request by request; the regret of routing decisions (what the best replica in hindsight
    would have given).

    Parameters
    ----------
    log
        Log of any format of docs/logs.md.
    config
        The servers as a configuration; its workload is the log.
    try_
        Another routing, split, scaling or set of GPUs: router.policy=round_robin (may be repeated).
    servers
        Names of the servers, in the order of the replicas; without it they are sorted.
    metric
        Latency whose regret is counted.
    decisions
        Decisions to look at, at random; 0 = all, -1 = none.
    output
        Directory for whatif.json and report.html.
    set_
        Override a key of every configuration.
    seed
        Of the draw of decisions and of the bootstrap.
    jobs
        Processes; 0 = one for each core.
    ray
        Address of a Ray cluster to run on, or local.
    quiet
        Print nothing.
    json
        The content of whatif.json on stdout.

    Examples
    --------
    emu whatif spans.json cluster.toml --try router.policy=prefix_aware --try replicas.0.count=6
    """
    from emu.whatif.command import whatif_command

    return whatif_command(
        log,
        config,
        try_,
        output=output,
        overrides=set_,
        servers=servers,
        metric=metric,
        decisions=decisions,
        seed=seed,
        jobs=jobs,
        ray=ray,
        quiet=quiet,
        as_json=json,
    )


def export(
    run: Path,
    output: Path,
    /,
    *,
    to: Literal["otel", "litellm", "gateway", "aiperf"] = "otel",
    quiet: Quiet = False,
) -> int:
    """A run (of `run` or `serve`) as the log that a real system would have left.

    Parameters
    ----------
    run
        Directory of a run that has ended.
    output
        File to write.
    to
        Its format (docs/logs.md).
    quiet
        Print nothing.

    Examples
    --------
    emu export runs/live/run spans.json
    """
    from emu.whatif.export import export_run

    count = export_run(run, output, to)
    if not quiet:
        print(f"{output}: {count:,} requests")
    return 0
