"""Every command: what it is for, the struct of its options, the function that answers.

Names only: `emu --help` loads none of what stands behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.cli.parser import Command

_START: Final = {
    "init": Command(
        "Write a commented cluster file to start from.",
        "emu.cli.start:InitOptions",
        "emu.cli.start:init",
    ),
    "validate": Command(
        "Read everything, run nothing: derived facts, or the first error.",
        "emu.cli.runs:ValidateOptions",
        "emu.cli.runs:validate",
    ),
    "run": Command(
        "Run one experiment (also: `emu CONFIG.toml`).",
        "emu.runs.options:RunOptions",
        "emu.cli.runs:run",
        "A directory that holds a run of another configuration is kept: the new run goes to DIR-2,"
        " DIR-3\nand so on.",
        (
            "emu run cluster.toml",
            "emu run cluster.toml --seed 7 --set scheduler.max_num_seqs=64 -o runs/small-batches",
            "emu run cluster.toml --set workload.path=/data/trace.jsonl",
            "emu run cluster.toml --seeds 5 -o runs/five",
            "emu run --model Llama-3.1-8B --gpu H100 --replicas 2 --rate 20 --preset code",
        ),
    ),
    "models": Command(
        "What the catalogue knows of models.",
        "emu.cli.start:CatalogueOptions",
        "emu.cli.start:models",
    ),
    "gpus": Command(
        "What the catalogue knows of GPUs.",
        "emu.cli.start:CatalogueOptions",
        "emu.cli.start:gpus",
    ),
    "workload convert": Command(
        "Write a workload in another format.",
        "emu.cli.workload:ConvertOptions",
        "emu.cli.workload:convert",
    ),
    "workload generate": Command(
        "Write a synthetic workload.",
        "emu.cli.workload:GenerateOptions",
        "emu.cli.workload:generate",
    ),
    "workload describe": Command(
        "Rates over time, lengths, sessions, shared prefixes: in figures and as a picture.",
        "emu.cli.workload:DescribeOptions",
        "emu.cli.workload:describe",
    ),
    "workload scale": Command(
        "Stretch arrivals and lengths.",
        "emu.cli.workload:ScaleOptions",
        "emu.cli.workload:scale",
    ),
    "workload slice": Command(
        "Cut a piece out, which then starts at 0.",
        "emu.cli.workload:SliceOptions",
        "emu.cli.workload:slice_",
    ),
}

_LOOK: Final = {
    "report": Command(
        "(Re)write report.html of a run that has ended.",
        "emu.cli.runs:ReportOptions",
        "emu.cli.runs:report",
    ),
    "compare": Command(
        "Runs side by side, or one run against a measurement.",
        "emu.cli.runs:CompareOptions",
        "emu.cli.runs:compare",
        "",
        (
            "emu compare runs/static runs/live --html compare.html",
            "emu compare runs/reproduced --measured requests.jsonl",
        ),
    ),
    "story": Command(
        "Tell what a replica was doing at an instant and why; or print the test that brings it"
        " there.",
        "emu.cli.runs:StoryOptions",
        "emu.cli.runs:story",
        "The run is emulated again up to that instant; nothing is written.",
        (
            "emu story runs/example --replica 3 --at 12.4s",
            "emu story runs/example --replica 3 --at 12.4s --as-test > test_replica.py",
        ),
    ),
    "export": Command(
        "A run (of `run` or `serve`) as the log that a real system would have left.",
        "emu.apps.whatif.options:ExportOptions",
        "emu.apps.whatif.export:export_command",
        "",
        ("emu export runs/live/run spans.json",),
    ),
}

_MANY: Final = {
    "plan": Command(
        "The cheapest cluster that meets objectives: GPUs, replicas, roles; as files to deploy.",
        "emu.apps.plan.options:PlanCommand",
        "emu.apps.plan.command:plan_command",
        "Exit status 3 if no cluster meets them.",
        ("emu plan --model Llama-3.1-8B --gpu H100=2.5 --rate 20 --preset code --ttft-p95 1s",),
    ),
    "whatif": Command(
        "Replay the log of a real server, and see what another choice would have given.",
        "emu.apps.whatif.options:WhatifOptions",
        "emu.apps.whatif.command:whatif_command",
        "Prints how far recorded and emulated latencies are apart; the difference that each"
        " alternative\nmakes, request by request; the regret of routing decisions (what the best"
        " replica in hindsight\nwould have given).",
        (
            "emu whatif spans.json cluster.toml --try router.policy=prefix_aware --try"
            " replicas.0.count=6",
        ),
    ),
    "scorecard": Command(
        "An outside router's choices in a live session beside emu's routers and an oracle.",
        "emu.apps.whatif.scorecard.options:ScorecardOptions",
        "emu.apps.whatif.scorecard.command:scorecard_command",
        "The same arrivals under each router: latencies, objectives, prefix hits, imbalance; and"
        " the regret of\ndecisions (what the best replica in hindsight would have saved).",
        ("emu scorecard runs/live --routers prefix_aware load",),
    ),
    "sweep": Command(
        "Many runs of one config: a grid, a list, random points or a search.",
        "emu.apps.sweeps.options:SweepCommand",
        "emu.apps.sweeps.command:sweep_command",
        "Started again after an interruption, it goes on where it was.",
        ("emu sweep capacity.toml -j 4",),
    ),
    "study": Command(
        "Named systems over seeds and workloads: means with intervals, differences in pairs.",
        "emu.apps.study.options:StudyOptions",
        "emu.apps.study.command:study_command",
        "Started again after an interruption, it goes on where it was. A run that fails is a row"
        " with its\nreason.",
        ("emu study study.toml --plot means.pdf --bundle artifact.tar.gz",),
    ),
    "experiment": Command(
        "Run a set of scaling experiments, print its tables, draw its pictures"
        " (docs/experiments/).",
        "emu.apps.experiments.options:ExperimentOptions",
        "emu.apps.experiments.command:run_experiment",
    ),
}

_PUBLISH: Final = {
    "plot": Command(
        "Draw a figure for a paper from runs: PDF, SVG or PNG.",
        "emu.cli.runs:PlotOptions",
        "emu.cli.runs:plot",
        "Needs matplotlib (extra `plots`). Fonts are embedded, colors are safe for colour-blind"
        " readers.",
        (
            "emu plot runs/static runs/live --figure ttft-cdf --out ttft.pdf",
            "emu plot runs/live --figure gpus --width double --out gpus.pdf",
            "emu plot runs/sweep --figure pareto --x output_throughput --y p99_ttft_ms --out"
            " trade-off.pdf",
        ),
    ),
    "rerun": Command(
        "Emulate runs again from their directories, and compare the results byte by byte.",
        "emu.cli.runs:RerunOptions",
        "emu.cli.runs:rerun",
        "Exit status 3, with the first line that differs and the reason, if they are not the"
        " same.\nA run that names classes of its own, or a program, is refused with the names of"
        " their files.",
    ),
    "bundle": Command(
        "Pack runs with their configurations, inputs, classes and this code for others.",
        "emu.cli.runs:BundleOptions",
        "emu.cli.runs:bundle",
        "The two commands of its README install the code and run everything again where it is"
        " unpacked.",
        ("emu bundle runs/static runs/live --out artifact.tar.gz",),
    ),
    "log": Command(
        "Send runs to an experiment tracker: configuration, figures, files.",
        "emu.cli.runs:LogOptions",
        "emu.cli.runs:log",
        "Needs the extra of the tracker (`wandb` or `mlflow`), set up by its own environment"
        " variables.",
        ("emu log runs/static runs/live --to mlflow --project scaling",),
    ),
}

_FAULTS: Final = {
    "resilience": Command(
        "What the faults of a configuration cost: the run beside the same run without them.",
        "emu.cli.faults:ResilienceOptions",
        "emu.cli.faults:resilience",
    ),
    "chaos": Command(
        "Many seeds of random faults, everything checked; exit status 4 if emu was wrong.",
        "emu.apps.chaos.options:ChaosOptions",
        "emu.cli.faults:chaos",
        "With --log-level: one seed, or one world of the corpus.",
    ),
}

_LIVE: Final = {
    "serve": Command(
        "Live mode: an OpenAI-compatible server that answers like the emulated cluster.",
        "emu.cli.live:ServeCommand",
        "emu.cli.live:serve",
    ),
    "observe": Command(
        "Drive a real OpenAI-compatible server with a workload and write measurements.",
        "emu.apps.observe.options:ObserveOptions",
        "emu.apps.observe.command:observe_command",
    ),
}

_MEASURED: Final = {
    "learn": Command(
        "An engine's model from a benchmark's result files, or from a live server.",
        "emu.apps.learn.options:LearnOptions",
        "emu.apps.learn.command:learn_command",
        "Writes OUTPUT/NAME.toml for `engine.learned`, judged at a load that it was not fitted to,"
        " and\nthe workload and configuration that the data were made into.",
    ),
    "fidelity": Command(
        "Emulate every measured run found below a directory, and compare.",
        "emu.apps.fidelity.options:FidelityOptions",
        "emu.apps.fidelity.command:fidelity_command",
    ),
    "reproduce": Command(
        "Emulate a measured run of vLLM from its own record, and compare the two.",
        "emu.apps.fidelity.options:ReproduceOptions",
        "emu.apps.fidelity.reproduce:reproduce_command",
    ),
    "profile": Command(
        "Measure real kernels on the GPU at hand; a bundle for the profile backend.",
        "emu.cli.profile:ProfileCommand",
        "emu.cli.profile:profile",
        "Needs PyTorch (extra `profiler`).",
    ),
    "import-cluster": Command(
        "An LLMServingSim cluster file as a configuration, on stdout.",
        "emu.cli.systems:ImportClusterOptions",
        "emu.cli.systems:import_cluster",
    ),
}

_ASTRA: Final = {
    "collective": Command(
        "Print how many cycles (of 1 ns) a collective takes on an idle network, as ASTRA-Sim"
        " counts.",
        "emu.cli.astra:CollectiveCommand",
        "emu.cli.astra:collective",
    ),
    "parity": Command(
        "Run LLMServingSim's own loop on the embedded executor; its clock to the nanosecond.",
        "emu.cli.parity:ParityCommand",
        "emu.cli.parity:parity",
        "For comparisons with that simulator: its habits (an idle clock in steps of 1 ms, late"
        " arrivals)\nare kept unless `--no-habits` is given. docs/lab/astra-sim.md says which.",
    ),
}

_TOOLS: Final = {
    "trace": Command(
        "Graphs and input files of one batch for ASTRA-Sim, or a graph as text.",
        "emu.cli.astra:TraceOptions",
        "emu.cli.astra:trace",
    ),
    "schema": Command(
        "JSON Schema of a configuration or of a sweep file, for editors.",
        "emu.cli.start:SchemaOptions",
        "emu.cli.start:schema",
    ),
    "completion": Command(
        "Completion of commands and options for a shell, on stdout.",
        "emu.cli.start:CompletionOptions",
        "emu.cli.start:completion",
        "",
        ("emu completion bash > ~/.local/share/bash-completion/completions/emu",),
    ),
}

HEADINGS: Final[Mapping[str, Mapping[str, Command]]] = MappingProxyType(
    {
        "Start": _START,
        "Look at runs": _LOOK,
        "Many runs": _MANY,
        "Publish": _PUBLISH,
        "Faults": _FAULTS,
        "Live": _LIVE,
        "Measurements and other systems": _MEASURED,
        "ASTRA-Sim": _ASTRA,
        "Tools": _TOOLS,
    }
)
"""Heading -> the commands below it, by their full names."""

GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {"workload": "Convert, generate, describe, scale and slice workloads."}
)
"""First words that several commands have -> what they are for."""

COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {name: command for group in HEADINGS.values() for name, command in group.items()}
)
"""All commands by their full names, those of groups included (`workload convert`)."""
