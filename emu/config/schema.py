"""The configuration: one Struct for each table of the TOML file, and nothing else.

Every key of the file is a field with its type, bounds, default and a docstring-like description
(`doc(...)`) that the reference page and `emu schema` print. Units stand in the names. The tables
stand by family in `emu/config/tables/`; this is the whole file, and where the others import tables
from. Reading, line numbers, `--set` and suggestions live in `emu/config/load.py`; checks that need
the catalogue live in `emu/config/load.py`.

Annotations are evaluated here, not kept as text: msgspec would compile each of them at every start.
"""

from typing import Annotated

from msgspec import field

from emu.config.tables import (
    Count,
    Count0,
    Dtype,
    Fraction,
    LimitsTable,
    NonNegative,
    OutputTable,
    Positive,
    PowerTable,
    Seed,
    SloTable,
    Table,
    Tokens,
    Tokens0,
    doc,
)
from emu.config.tables.cluster import (
    AutoscaleTable,
    CommandTable,
    EncodersTable,
    FaultTable,
    GpuTable,
    KvRejectTable,
    MigrationTable,
    ModelTable,
    NetworkTable,
    NodeTable,
    PlacedTensors,
    PlacementRule,
    PlacementTable,
    RecoveryTable,
    ReplicaTable,
    ServedModelTable,
)
from emu.config.tables.serving import (
    AiconfiguratorTable,
    AstraTable,
    FasterTransformerTable,
    FcfsTable,
    LatencyTable,
    LightLlmTable,
    LinearTable,
    OrcaTable,
    OwnLatencyTable,
    OwnSchedulerTable,
    PagedTable,
    ProfileTable,
    ReservedTable,
    RooflineTable,
    RouterTable,
    SarathiTable,
    SchedulerTable,
    SpeculativeTable,
    TenantAcceptance,
    VidurLayersTable,
    VidurTable,
    VllmTable,
    VllmV0Table,
)
from emu.config.tables.workload import (
    ArrivalsTable,
    ImagesTable,
    LengthsTable,
    SessionsTable,
    SyntheticTable,
    WorkloadTable,
)

__all__ = [
    "AiconfiguratorTable",
    "ArrivalsTable",
    "AstraTable",
    "AutoscaleTable",
    "CommandTable",
    "Config",
    "Count",
    "Count0",
    "Dtype",
    "EncodersTable",
    "FasterTransformerTable",
    "FaultTable",
    "FcfsTable",
    "Fraction",
    "GpuTable",
    "ImagesTable",
    "KvRejectTable",
    "LatencyTable",
    "LengthsTable",
    "LightLlmTable",
    "LimitsTable",
    "LinearTable",
    "MigrationTable",
    "ModelTable",
    "NetworkTable",
    "NodeTable",
    "NonNegative",
    "OrcaTable",
    "OutputTable",
    "OwnLatencyTable",
    "OwnSchedulerTable",
    "PagedTable",
    "PlacedTensors",
    "PlacementRule",
    "PlacementTable",
    "Positive",
    "PowerTable",
    "ProfileTable",
    "RecoveryTable",
    "ReplicaTable",
    "ReservedTable",
    "RooflineTable",
    "RouterTable",
    "SarathiTable",
    "SchedulerTable",
    "Seed",
    "ServedModelTable",
    "SessionsTable",
    "SloTable",
    "SpeculativeTable",
    "SyntheticTable",
    "Table",
    "TenantAcceptance",
    "Tokens",
    "Tokens0",
    "VidurLayersTable",
    "VidurTable",
    "VllmTable",
    "VllmV0Table",
    "WorkloadTable",
    "doc",
]


class Config(Table, kw_only=True, frozen=True):
    """The whole file."""

    seed: Annotated[Seed, doc("Seed of every random stream.")] = 42
    model: ModelTable = field(default_factory=ModelTable)
    nodes: list[NodeTable] = field(default_factory=lambda: [NodeTable()])
    replicas: list[ReplicaTable] = field(default_factory=lambda: [ReplicaTable()])
    models: list[ServedModelTable] = field(default_factory=list)
    workload: WorkloadTable = field(default_factory=WorkloadTable)
    router: RouterTable = field(default_factory=RouterTable)
    scheduler: SchedulerTable = field(default_factory=VllmTable)
    encoders: EncodersTable | None = None
    latency: LatencyTable = field(default_factory=RooflineTable)
    network: NetworkTable = field(default_factory=NetworkTable)
    autoscale: AutoscaleTable | None = None
    kv_reject: KvRejectTable | None = None
    migration: MigrationTable = field(default_factory=MigrationTable)
    commands: list[CommandTable] = field(default_factory=list)
    faults: list[FaultTable] = field(default_factory=list)
    recovery: RecoveryTable = field(default_factory=RecoveryTable)
    slo: SloTable = field(default_factory=SloTable)
    power: PowerTable | None = None
    output: OutputTable = field(default_factory=OutputTable)
    limits: LimitsTable = field(default_factory=LimitsTable)
