"""Max-min fair division: which flows a change can touch (`component`) and the division itself."""

from __future__ import annotations

from collections.abc import Iterable

from emu.kernel.natives import heapify, heappop, heappush
from emu.network.links import Flow, Link


def component(links: Iterable[Link], flows: Iterable[Flow]) -> tuple[list[Flow], list[Link]]:
    """Everything connected to these: by a shared link, or as feeder and follower."""
    seen_links = {link.index: link for link in links}
    seen_flows = {flow.seq: flow for flow in flows}
    link_stack = list(seen_links.values())
    flow_stack = list(seen_flows.values())
    while link_stack or flow_stack:
        if link_stack:
            near: list[Flow] = list(link_stack.pop().running.values())
        else:
            flow = flow_stack.pop()
            if flow.is_running:
                for link in flow.links:
                    if link.index not in seen_links:
                        seen_links[link.index] = link
                        link_stack.append(link)
            near = list(flow.followers)
            if flow.feeder is not None:
                near.append(flow.feeder)
        for flow in near:
            if flow.seq not in seen_flows:
                seen_flows[flow.seq] = flow
                flow_stack.append(flow)
    return list(seen_flows.values()), list(seen_links.values())


def fill(flows: list[Flow], links: list[Link]) -> None:
    """Put the share of each flow of one or more whole components into `next_rate`.

    Shares are rounded down, so that their sum never exceeds a link's capacity.
    """
    for flow in flows:
        flow.next_rate = -1 if flow.is_running else 0
    levels: list[tuple[int, int, Link]] = []
    for link in links:
        weight = 0
        for flow in link.running.values():
            weight += flow.weight
        link.fill_left = link.capacity
        link.fill_weight = weight
        if weight:
            levels.append((link.capacity // weight, link.index, link))
    for flow in flows:
        if flow.is_attached and flow.feeder is not None and not flow.feeder.is_running:
            _stay(flow, 0)
    heapify(levels)
    while levels:
        level, index, link = heappop(levels)
        if not link.fill_weight:
            continue
        # Levels only rise while others are decided, so an outdated entry is too low at worst.
        level_now = link.fill_left // link.fill_weight
        if level_now > level:
            heappush(levels, (level_now, index, link))
            continue
        for flow in link.running.values():
            if flow.next_rate < 0:
                _stay(flow, level * flow.weight)


def _stay(flow: Flow, rate: int) -> None:
    """Decide the rate of a flow, and of the followers that it holds back."""
    stack = [flow]
    while stack:
        flow = stack.pop()
        if flow.next_rate >= 0:
            continue
        flow.next_rate = rate
        for link in flow.links:
            link.fill_left -= rate
            link.fill_weight -= flow.weight
        if flow.followers:
            stack.extend([follower for follower in flow.followers if follower.is_attached])
