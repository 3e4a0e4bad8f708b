"""A group of ranks that share experts, from the loss of a rank until it is whole again. Pure.

The machine knows which ranks are gone and what the group waits for. Time comes in events: an action
`After` asks for one later. Each stall has a number, so that what was asked for before a newer loss
means nothing when it comes (`stall` of an event).

    SERVING    all ranks take part
    STALLED    a rank is gone, and nothing comes out: all wait for it in the next exchange
    FENCED     the loss is detected; survivors agree on what is left
    RELOADING  experts without a copy on a survivor are read into slots of second copies
    DEGRADED   survivors serve; ranks are missing
    JOINING    a rank is back: a barrier, and experts are placed anew
    FAILED     too few slots are left, or an expert has no copy: the whole group starts again
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from emu.errors import UnexpectedEvent


class GroupState(enum.Enum):
    """See the module's head."""

    SERVING = "serving"
    STALLED = "stalled"
    FENCED = "fenced"
    RELOADING = "reloading"
    DEGRADED = "degraded"
    JOINING = "joining"
    FAILED = "failed"


S = GroupState


class RankLost(NamedTuple):
    """The process of a member is gone."""

    member: int
    is_known: bool = False
    """It was given up because it stood still: nothing has to be detected."""


class Detected(NamedTuple):
    """The survivors have waited so long for the missing ranks that they know."""

    stall: int
    """Number of the stall that it belongs to."""


class Agreed(NamedTuple):
    """All survivors know which ranks are left."""

    stall: int
    """Number of the stall that it belongs to."""


class Reloaded(NamedTuple):
    """Every expert has a copy again."""

    stall: int
    """Number of the stall that it belongs to."""


class RankReady(NamedTuple):
    """A member's process is back, with its weights."""

    member: int


class Joined(NamedTuple):
    """All ranks know of it, and experts are placed on them."""

    stall: int
    """Number of the stall that it belongs to."""


Event = RankLost | Detected | Agreed | Reloaded | RankReady | Joined
Timed = Detected | Agreed | Reloaded | Joined


class Order(enum.Enum):
    """Actions that say all by their name."""

    STALL = "no member goes on"
    RESUME = "members that are there go on"
    LOSE_GROUP = "all members start again"


class Fence(NamedTuple):
    """The loss of these members is known: their requests are lost, routers see it."""

    members: tuple[int, ...]


class After(NamedTuple):
    """An event of the group comes so much later."""

    delay_ns: int
    event: Timed


Action = Order | Fence | After


class Plan(Protocol):
    """How long things take, and what is possible."""

    detect_ns: int
    agree_ns: int
    join_ns: int
    """Barrier and new placement."""

    def reload_ns(self, lost: frozenset[int]) -> int:
        """Time until every expert has a copy without these members; -1 = it never has."""
        ...


class ExpertGroup:
    """One group. Only this module writes its fields."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.plan = plan
        self.state = S.SERVING
        self.lost: frozenset[int] = frozenset()
        """Members that are gone."""
        self.stall = 0
        """Number of the last stall."""
        self._fenced: frozenset[int] = frozenset()
        """Of those that are gone, the ones that routers know of."""
        self._waiting: frozenset[int] = frozenset()
        """Members that are back and wait for the group to go on."""
        self.must_restart = False
        """It has failed, and its members have not been told to start again."""

    def step(self, event: Event) -> list[Action]:
        """What follows from an event. Raises UnexpectedEvent."""
        if isinstance(event, Timed) and event.stall != self.stall:
            return []  # a newer loss has begun the wait anew
        try:
            handler = TABLE[self.state, type(event)]
        except KeyError:
            problem = f"group {self.name} is {self.state.value} and got {event}"
            raise UnexpectedEvent(problem) from None
        return handler(self, event)

    # Handlers.
    def on_lost(self, event: Event) -> list[Action]:
        """The first loss stalls the group; a further one begins the wait anew."""
        assert isinstance(event, RankLost)
        is_running = self.state in (S.SERVING, S.DEGRADED)
        self.lost |= {event.member}
        self._waiting -= {event.member}
        self._fenced -= {event.member}  # it may have been back
        self.stall += 1
        self.state = S.STALLED
        begins: list[Action] = [Order.STALL] if is_running else []
        detect_ns = 0 if event.is_known else self.plan.detect_ns
        return [*begins, After(detect_ns, Detected(self.stall))]

    def on_detected(self, event: Event) -> list[Action]:
        """Routers and requests hear of it."""
        self.state = S.FENCED
        new = tuple(sorted(self.lost - self._fenced))
        self._fenced = self.lost
        return [Fence(new), After(self.plan.agree_ns, Agreed(self.stall))]

    def on_agreed(self, event: Event) -> list[Action]:
        """Experts that are gone are read again, if there is room and a source."""
        reload_ns = self.plan.reload_ns(self.lost)
        if reload_ns < 0:
            self.state, self.must_restart = S.FAILED, True
            return [Order.RESUME, Order.LOSE_GROUP]
        self.state = S.RELOADING
        return [After(reload_ns, Reloaded(self.stall))]

    def on_reloaded(self, event: Event) -> list[Action]:
        """Survivors go on, or take in those that came back meanwhile."""
        if self._waiting:
            return self._join()
        self.state = S.DEGRADED
        return [Order.RESUME]

    def on_ready(self, event: Event) -> list[Action]:
        """A member is back while the others serve."""
        assert isinstance(event, RankReady)
        self._waiting |= {event.member}
        return [Order.STALL, *self._join()]

    def on_ready_early(self, event: Event) -> list[Action]:
        """A member is back while the group does not serve: it waits."""
        assert isinstance(event, RankReady)
        self._waiting |= {event.member}
        return []

    def _join(self) -> list[Action]:
        self.state = S.JOINING
        return [After(self.plan.join_ns, Joined(self.stall))]

    def on_joined(self, event: Event) -> list[Action]:
        """The group is larger again."""
        self.lost -= self._waiting
        self._fenced &= self.lost
        self._waiting = frozenset()
        self.state = S.DEGRADED if self.lost else S.SERVING
        return [Order.RESUME]

    def on_restarted(self, event: Event) -> list[Action]:
        """A member of a group that starts again is back; the last one makes it whole."""
        assert isinstance(event, RankReady)
        self.lost -= {event.member}
        self._fenced &= self.lost
        self._waiting = frozenset()
        if not self.lost:
            self.state = S.SERVING
        return []

    def on_lost_again(self, event: Event) -> list[Action]:
        """A member of a group that starts again is gone once more: it is known at once."""
        assert isinstance(event, RankLost)
        self.lost |= {event.member}
        return [Fence((event.member,))]

    def all_lost(self, members: frozenset[int]) -> None:
        """The group starts again with these members."""
        assert self.state is S.FAILED
        self.lost = self._fenced = members
        self.must_restart = False


Handler = Callable[[ExpertGroup, Event], list[Action]]
_G = ExpertGroup
TABLE: Final[Mapping[tuple[GroupState, type[Event]], Handler]] = MappingProxyType(
    {
        (S.SERVING, RankLost): _G.on_lost,
        (S.STALLED, RankLost): _G.on_lost,
        (S.FENCED, RankLost): _G.on_lost,
        (S.RELOADING, RankLost): _G.on_lost,
        (S.DEGRADED, RankLost): _G.on_lost,
        (S.JOINING, RankLost): _G.on_lost,
        (S.FAILED, RankLost): _G.on_lost_again,
        (S.STALLED, Detected): _G.on_detected,
        (S.FENCED, Agreed): _G.on_agreed,
        (S.RELOADING, Reloaded): _G.on_reloaded,
        (S.JOINING, Joined): _G.on_joined,
        (S.STALLED, RankReady): _G.on_ready_early,
        (S.FENCED, RankReady): _G.on_ready_early,
        (S.RELOADING, RankReady): _G.on_ready_early,
        (S.JOINING, RankReady): _G.on_ready_early,
        (S.DEGRADED, RankReady): _G.on_ready,
        (S.FAILED, RankReady): _G.on_restarted,
    }
)
