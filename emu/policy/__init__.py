"""What a policy of a user's own sees, and what each kind of it must have.

views.py     plain values: requests, replicas, transfers, requests that have ended
books.py     windows over what has passed the gateway: rates, percentiles, attainment, forecasts
context.py   the one object that a policy is given
calls.py     policies of one's own behind the calls of emu: what they answer is checked

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
