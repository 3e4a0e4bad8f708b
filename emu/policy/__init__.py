"""What a policy of a user's own sees, and what each kind of it must have.

views.py     plain values: requests, replicas, transfers; policies of one's own behind emu's calls
context.py   the one object that a policy is given; windows over what has passed the gateway

A class whose constructor has a parameter `context` gets a `Context` (docs/plugins.md).
"""

from emu.policy.context import Context, Forecast, Rates
from emu.policy.views import Ended, ReplicaView, RequestView, TransferView

__all__ = [
    "Context",
    "Ended",
    "Forecast",
    "Rates",
    "ReplicaView",
    "RequestView",
    "TransferView",
]
