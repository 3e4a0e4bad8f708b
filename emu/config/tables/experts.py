"""What `[engine]` says of experts that several ranks share: exchange, overlap, balance."""

from typing import ClassVar, Literal

from emu.config.tables import Count, Count0, Fraction, NonNegative, Only, OnlyThen, Table, doc
from emu.process.annotated import Annotated

All2all = Literal["auto", "allgather_reducescatter", "deepep", "mnnvl"]
Overlap = Literal["auto", "none", "two_batch", "single_batch"]


class RankLossKeys(Table, kw_only=True, frozen=True):
    """Keys of `[recovery]` for groups that share experts by `[engine]`."""

    only: ClassVar[OnlyThen] = {
        "ep_detect_s": Only("ep_fault", ("mask",)),
        "ep_agree_s": Only("ep_fault", ("mask",)),
        "expert_backup": Only("ep_fault", ("mask",)),
    }
    ep_fault: Annotated[
        Literal["restart", "mask"],
        doc("A group that shares experts loses a rank: all start again, or the others go on."),
    ] = "restart"
    ep_detect_s: Annotated[
        NonNegative, doc("Until survivors know that a rank is gone (timeout of the exchange).")
    ] = 10.0
    ep_agree_s: Annotated[NonNegative, doc("Until they agree on which ranks are left.")] = 0.5
    expert_backup: Annotated[
        Literal["host", "peer", "disk", "none"],
        doc("Where experts without a copy on a survivor are read from; none: the group fails."),
    ] = "host"


class ExpertKeys(Table, kw_only=True, frozen=True):
    """Keys for models with experts."""

    only: ClassVar[OnlyThen] = {"micro_batches": Only("expert_gpus")}

    all2all: Annotated[
        All2all,
        doc(
            "How tokens reach experts of other ranks: allgather_reducescatter, deepep (normal kernels for prompts, low-latency ones for decodes), mnnvl (one NVLink domain, one-sided); auto = the engine's default."
        ),
    ] = "auto"
    overlap: Annotated[
        Overlap,
        doc(
            "What hides the exchange: nothing, the other half of the batch (two_batch), or the shared expert and the down product (single_batch); auto = the engine's default."
        ),
    ] = "auto"
    expert_gpus: Annotated[
        Count0,
        doc(
            "GPUs beside the group that hold and compute its experts (attention apart from experts): expert_parallel of the group is this number; 0 = the members' own GPUs."
        ),
    ] = 0
    micro_batches: Annotated[
        Count,
        doc("Parts of a batch that go between attention and experts in turn."),
    ] = 3
    expert_popularity: Annotated[
        str,
        doc(
            "How unevenly experts are chosen: uniform, lognormal:SIGMA, zipf:EXPONENT, or a CSV of counts (a row a layer, a column an expert); auto = lognormal:1 with deepep and mnnvl, else a spread of 16 without an effect between ranks."
        ),
    ] = "auto"
    expert_drift_s: Annotated[
        NonNegative,
        doc("Time in which the popularity of experts loses its likeness to 1/e; 0 = it stays."),
    ] = 0.0
    redundant_experts: Annotated[
        Count0, doc("Expert slots of a layer beyond its experts; the popular have copies (EPLB).")
    ] = 0
    eplb_algorithm: Annotated[
        Literal["auto", "global", "trivial"],
        doc(
            "What is dealt to ranks when experts are placed by load: groups of a group-limited router to machines first, where these divide them (auto; SGLang's deepseek_hierarchical), or all slots at once (global; its deepseek); trivial = nothing is placed by load, and the copies are those of the first experts (SGLang's, where no init_expert_location is given)."
        ),
    ] = "auto"
    # The mean of two groups with copies. TensorRT-LLM's ranks were 11 per cent above the mean, 288
    # slots on 32 ranks and 256 tokens of each (tech blog 4): 0.995. In traces of SGLang on 48 GB200,
    # 288 slots placed by an earlier run's counts, what two ranks send back scatters by 17 per cent
    # over 58 layers, the same in each step (shifangx/Scripts-SGLang at 481e976): 0.95.
    eplb_likeness: Annotated[
        Fraction,
        doc(
            "Correlation of the logarithms of the loads that experts are placed by and of those that they serve."
        ),
    ] = 0.97
    eplb_interval_s: Annotated[
        NonNegative,
        doc("Time between two placements of experts by load; 0 = placed once, if at all."),
    ] = 0.0
