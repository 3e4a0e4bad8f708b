"""What the records of a flow table say of this instant; transfers over one path."""

from collections.abc import Sequence
from typing import Any

from emu.network.flows import FlowTable, TransferSpec
from emu.network.links import UNITS_PER_RATE


def rate_of(table: FlowTable, flow_id: int) -> float:
    """Present rate of a transfer, all parts, in bytes per second."""
    table.recount()  # applies what has changed at this instant
    transfer = table.transfer(flow_id)
    assert transfer is not None
    return sum(flow.rate for flow in transfer.flows) / UNITS_PER_RATE


def utilization(table: FlowTable, link: int) -> float:
    """Part of a link's present capacity in use; 0 for a link that is down."""
    table.recount()
    record = table.links[link]
    used = sum(flow.rate for flow in record.running.values())
    return used / record.capacity if record.capacity else 0.0


def start(
    table: FlowTable,
    flow_id: int,
    links: Sequence[int],
    size_bytes: int,
    now_ns: int,
    tag: Any = None,
    **options: Any,
) -> None:
    """Start a transfer over one path; options as of `TransferSpec`."""
    table.start_group(flow_id, ((links, size_bytes),), now_ns, TransferSpec(**options), tag)
