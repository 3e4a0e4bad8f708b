"""`[router]`: which replica a request goes to, and which requests are let in.

`policy` chooses the kind. The class of a kind is its entry in the registry of routers
(`emu/config/kinds.py`): `tag` is its name, the only place where that is written, `made_by` the
class that implements it, its docstring what the pages say, and its fields are the keys that it
reads beside those of all routers.
"""

from typing import ClassVar

from msgspec import field

from emu.config.tables import OWN, Count0, NonNegative, Table, Tokens0, doc, tag_of
from emu.documents import Document
from emu.process.annotated import Annotated


class RouterTable(Table, kw_only=True, frozen=True, tag_field="policy"):
    """Which replica a request goes to, and which requests are let in."""

    made_by: ClassVar[str] = ""
    """The class that implements it, as module:Class."""
    asks: ClassVar[str] = ""
    """What it asks of replicas beside their signals, which not every cluster has."""
    signal_delay_ms: Annotated[NonNegative, doc("Age of the signals that the router sees.")] = 0.0
    max_outstanding: Annotated[
        Count0, doc("Admission: requests in the system; 0 = unlimited (429).")
    ] = 0
    max_prompt_tokens: Annotated[
        Tokens0, doc("Admission: longest prompt; 0 = the model's limit (422).")
    ] = 0
    admission: Annotated[
        str,
        doc(
            "A class that admits requests or refuses them, beside the two limits above (docs/plugins.md); empty = none."
        ),
    ] = ""
    admission_own: Annotated[Document, doc(OWN)] = field(default_factory=dict)
    decode_policy: Annotated[
        str,
        doc(
            "P/D: where KV goes: first_free (fills one by one), least_used, or package.module:Class; auto = the emptiest without [autoscale]."
        ),
    ] = "auto"
    decode_policy_own: Annotated[Document, doc(OWN)] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """The name of its kind."""
        return tag_of(type(self))


class LoadTable(RouterTable, kw_only=True, frozen=True, tag="load"):
    """Least waiting x 4 + running, as vLLM's data-parallel balancer counts."""

    made_by = "emu.routing.policies:LoadRouter"


class RoundRobinTable(RouterTable, kw_only=True, frozen=True, tag="round_robin"):
    """One after another, by replica id."""

    made_by = "emu.routing.policies:RoundRobinRouter"


class RandomTable(RouterTable, kw_only=True, frozen=True, tag="random"):
    """Uniformly at random."""

    made_by = "emu.routing.policies:RandomRouter"


class LeastOutstandingTable(RouterTable, kw_only=True, frozen=True, tag="least_outstanding"):
    """Fewest requests, waiting and running."""

    made_by = "emu.routing.policies:LeastOutstandingRouter"


class PrefixAwareTable(RouterTable, kw_only=True, frozen=True, tag="prefix_aware"):
    """Longest cached prefix, unless the replica is far more loaded than the others."""

    made_by = "emu.routing.policies:PrefixAwareRouter"
    asks = "caches"


class LoraAffinityTable(RouterTable, kw_only=True, frozen=True, tag="lora_affinity"):
    """Replicas that have the request's adapter on the GPU first, then the least loaded."""

    made_by = "emu.routing.policies:LoraAffinityRouter"
    asks = "adapters"


class OwnRouterTable(RouterTable, kw_only=True, frozen=True, tag=False):
    """A class of one's own; its own keys stand in `[router.own]`."""

    policy: Annotated[str, doc("package.module:Class")]
    own: Annotated[Document, doc(OWN)] = field(default_factory=dict)


ROUTERS_OF_ALL = (
    LoadTable,
    RoundRobinTable,
    RandomTable,
    LeastOutstandingTable,
    PrefixAwareTable,
)
"""Kinds for any requests; the first is the default."""
ROUTERS = (*ROUTERS_OF_ALL, LoraAffinityTable)
"""All kinds."""
