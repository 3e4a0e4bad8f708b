"""`[workload]`: what is asked, requests from a file or from distributions."""

from typing import ClassVar, Literal

from msgspec import Meta, field

from emu.config.names import WorkloadFormat
from emu.config.tables import (
    Count,
    Count0,
    NonNegative,
    Only,
    OnlyThen,
    Positive,
    Table,
    Tokens,
    Tokens0,
    doc,
)
from emu.process.annotated import Annotated

WorkloadPreset = Literal["", "agents", "chat", "code", "conversation", "summarization"]


class ArrivalsTable(Table, kw_only=True, frozen=True):
    """When synthetic requests arrive."""

    only: ClassVar[OnlyThen] = {
        "rate_per_s": Only("process", ("poisson", "gamma", "constant", "burst")),
        "cv": Only("process", ("gamma",)),
        "burst_rate_per_s": Only("process", ("burst",)),
        "burst_every_s": Only("process", ("burst",)),
        "burst_length_s": Only("process", ("burst",)),
        "points": Only("process", ("piecewise",)),
    }
    process: Annotated[
        Literal["poisson", "gamma", "constant", "burst", "piecewise", "all_at_once"],
        doc("Arrival process."),
    ] = "poisson"
    rate_per_s: Annotated[Positive, doc("Mean rate, requests per second.")] = 1.0
    cv: Annotated[float, doc("gamma: coefficient of variation of the gaps.", ge=1e-6, le=1e6)] = 1.0
    burst_rate_per_s: Annotated[Positive, doc("burst: rate inside bursts.")] = 10.0
    burst_every_s: Annotated[Positive, doc("burst: time between the starts of bursts.")] = 60.0
    burst_length_s: Annotated[Positive, doc("burst: length of a burst.")] = 5.0
    points: Annotated[
        list[list[float]], doc("piecewise: [second, rate] pairs; linear between them.")
    ] = field(default_factory=list)


class LengthsTable(Table, kw_only=True, frozen=True):
    """How long synthetic prompts or outputs are."""

    only: ClassVar[OnlyThen] = {
        "value": Only("distribution", ("fixed",)),
        "min": Only("distribution", ("uniform", "zipf", "lognormal", "trace")),
        "max": Only("distribution", ("uniform", "zipf", "lognormal", "trace")),
        "median": Only("distribution", ("lognormal",)),
        "sigma": Only("distribution", ("lognormal",)),
        "theta": Only("distribution", ("zipf",)),
        "path": Only("distribution", ("trace",)),
    }
    distribution: Annotated[
        Literal["fixed", "uniform", "zipf", "lognormal", "trace"], doc("Distribution of a length.")
    ] = "lognormal"
    value: Annotated[Tokens, doc("fixed: the length.")] = 512
    min: Annotated[Tokens, doc("Smallest length.")] = 1
    max: Annotated[Tokens, doc("Largest length.")] = 8192
    median: Annotated[Positive, doc("lognormal: median.")] = 512.0
    sigma: Annotated[Positive, doc("lognormal: standard deviation of the logarithm.")] = 1.0
    theta: Annotated[Positive, doc("zipf: exponent.")] = 0.6
    path: Annotated[str, doc("trace: a workload file to draw pairs from.")] = ""


class SessionsTable(Table, kw_only=True, frozen=True):
    """Synthetic conversations; one turn each = independent requests."""

    only: ClassVar[OnlyThen] = {
        "branches": Only("turns_max"),
        "tool_s": Only("turns_max"),
        "shared_context": Only("turns_max"),
    }
    turns_min: Annotated[Count, doc("Requests per session, at least.")] = 1
    turns_max: Annotated[int, doc("Requests per session, at most.", ge=1, le=100_000)] = 1
    branches: Annotated[
        int,
        doc(
            "Every second turn is asked as 1 to so many requests at once, and the next turn waits for "
            "all of them (agents with sub-agents); 1 = a chain.",
            ge=1,
            le=64,
        ),
    ] = 1
    tool_s: Annotated[NonNegative, doc("Mean pause between turns (exponential).")] = 2.0
    shared_context: Annotated[bool, doc("Each turn's prompt starts with all earlier turns.")] = True


class ImagesTable(Table, kw_only=True, frozen=True):
    """Images of synthetic requests; they stand before the prompt's own tokens."""

    share: Annotated[float, doc("Part of the requests that have images.", ge=0, le=1)] = 1.0
    count: Annotated[Count, doc("Images of such a request.")] = 1
    tokens: Annotated[
        Tokens, doc("Tokens of an image in the prompt (Qwen3-VL: pixels / 1024).")
    ] = 1024
    distinct: Annotated[
        Count0, doc("Images are drawn from so many; 0 = every image is another one.")
    ] = 0


class SyntheticTable(Table, kw_only=True, frozen=True):
    """A workload made from distributions and the seed."""

    only: ClassVar[OnlyThen] = {
        "prefix_tokens": Only("prefix_groups"),
    }
    requests: Annotated[int, doc("Number of requests (sessions count as one each).", ge=1)] = 1000
    duration_s: Annotated[NonNegative, doc("Stop at this time instead; 0 = by count.")] = 0.0
    arrivals: ArrivalsTable = field(default_factory=ArrivalsTable)
    prompt: LengthsTable = field(default_factory=LengthsTable)
    output: LengthsTable = field(
        default_factory=lambda: LengthsTable(median=128.0, sigma=0.8, max=2048)
    )
    sessions: SessionsTable = field(default_factory=SessionsTable)
    tenants: Annotated[Count, doc("Requests are dealt over this many tenants.")] = 1
    prefix_groups: Annotated[Count0, doc("Number of distinct shared prefixes; 0 = none.")] = 0
    prefix_tokens: Annotated[Tokens0, doc("Length of a shared prefix.")] = 0
    images: Annotated[
        ImagesTable | None, doc("Images in prompts (docs/lab/architectures.md); absent: none.")
    ] = None
    adapters: Annotated[
        Count0,
        doc(
            "Requests name one of this many LoRA adapters, number i in proportion to 1 / i; 0 = none."
        ),
    ] = 0


class WorkloadTable(Table, kw_only=True, frozen=True):
    """The requests: a file, or made from distributions."""

    only: ClassVar[OnlyThen] = {
        "format": Only("path"),
        "columns": Only("path"),
        "model_run": Only("model_shares"),
    }
    path: Annotated[str, doc("Workload file; empty = synthetic.")] = ""
    preset: Annotated[
        WorkloadPreset,
        doc("Keys of [workload.synthetic] that the file leaves out, for a known kind of service."),
    ] = ""
    format: Annotated[
        WorkloadFormat,
        doc("auto = recognized by content."),
    ] = "auto"
    columns: Annotated[
        dict[str, str],
        doc(
            "CSV with names of its own: meaning -> column, such as arrival_ms, prompt, output, session."
        ),
    ] = field(default_factory=dict)
    limit: Annotated[int, doc("First N lines; 0 = all.", ge=0)] = 0
    time_scale: Annotated[Positive, doc("> 1 stretches arrivals.")] = 1.0
    rate_per_s: Annotated[
        NonNegative,
        doc("Stretch arrivals to this mean rate of lines (a session is one); 0 = as they are."),
    ] = 0.0
    upscale: Annotated[
        int,
        doc(
            "So many lines arrive at each time of the file: line k at the time of line k / N (as BlitzScale makes traces denser).",
            ge=1,
            le=1000,
        ),
    ] = 1
    concurrency: Annotated[
        Count0,
        doc(
            "Closed loop: so many clients, each with one line (request or session) in flight; 0 = "
            "requests arrive at their times."
        ),
    ] = 0
    max_in_flight: Annotated[
        Count0,
        doc(
            "Arrivals keep their times, with at most so many lines in flight: the client sends the next one when one has ended, as load generators with a rate and --max-concurrency do; 0 = no limit."
        ),
    ] = 0
    start_s: Annotated[NonNegative, doc("Skip what arrives earlier.")] = 0.0
    max_prompt_tokens: Annotated[Tokens0, doc("Clip longer prompts (counted); 0 = off.")] = 0
    max_output_tokens: Annotated[Tokens0, doc("Clip longer outputs (counted); 0 = off.")] = 0
    oversized: Annotated[
        Literal["error", "reject", "clip"],
        doc("What to do with a request that no replica could ever hold."),
    ] = "error"
    models: Annotated[
        dict[str, str], doc("Several models: a name in the file -> the served name it means.")
    ] = field(default_factory=dict)
    model_shares: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1e9)]],
        doc(
            "Several models: requests that name none are dealt to these in proportion; empty = to the first."
        ),
    ] = field(default_factory=dict)
    model_run: Annotated[
        float,
        doc("model_shares: mean number of consecutive requests for the same model.", ge=1, le=1e6),
    ] = 1.0
    turns: Annotated[
        Literal["first", "all"],
        doc("sharegpt: the first question and answer, or the conversation as a session."),
    ] = "first"
    think_s: Annotated[
        NonNegative, doc("turns = all: mean pause before the next question (exponential).")
    ] = 0.0
    seed: Annotated[
        int, doc("Of arrivals and lengths that are drawn; -1 = the run's seed.", ge=-1)
    ] = -1
    tokenizer: Annotated[str, doc("sharegpt: path of a tokenizer.json; empty = estimate.")] = ""
    synthetic: SyntheticTable | None = None
