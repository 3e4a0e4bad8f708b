"""A replica's life can be written down: what it hears and what it wants done holds no code."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest

from emu.migration import live_move, messages
from emu.replica import actions, events
from emu.replica.events import Asked, Event, Kind, to_plain
from emu.replica.states import ReplicaState
from emu.request import Status
from tests.replica.test_machine import samples


def structs_of(module: ModuleType) -> list[type]:
    """Structs that the module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
    ]


def parts_of(annotation: Any) -> Iterator[Any]:
    """The annotation, and whatever stands in it: members of unions, of lists, fields of structs."""
    yield annotation
    yield typing.get_origin(annotation)
    for part in typing.get_args(annotation):
        yield from parts_of(part)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        for field in typing.get_type_hints(annotation).values():
            yield from parts_of(field)


class Calls(msgspec.Struct):
    """What no event may be."""

    back: list[collections.abc.Callable[[], None]] | None


def test_a_callable_is_found_wherever_it_stands() -> None:
    assert collections.abc.Callable in list(parts_of(Calls))


@pytest.mark.parametrize("module", [events, actions, messages, live_move])
def test_no_event_and_no_action_holds_a_callable(module: ModuleType) -> None:
    found = structs_of(module)
    assert len(found) > 10
    for struct in found:
        assert collections.abc.Callable not in list(parts_of(struct)), struct


def test_every_event_can_be_written_as_json_with_requests_by_id() -> None:
    written = {kind: to_plain(event) for kind, event in samples().items()}
    assert set(written) == set(Kind) - {Kind.BOUNDARY}
    for kind, plain in written.items():
        assert msgspec.json.decode(msgspec.json.encode(plain)) == plain
        assert plain["event"] == kind.name.lower()
        assert set(plain) == {"event", *type(samples()[kind]).__struct_fields__}
    assert written[Kind.UNRESERVED] == {"event": "unreserved", "requests": [7]}
    assert written[Kind.STOP_ASKED] == {
        "event": "stop_asked",
        "request": 7,
        "asked": {"by": "migrator", "number": 0},
    }
    assert written[Kind.COMMANDED]["to"] == ReplicaState.FAILED.value
    assert written[Kind.CANCELLED]["status"] == Status.CANCELLED.value


class Strange(Event):
    """An event that holds what it should not."""

    kind: typing.ClassVar[int] = int(Kind.LOOKED)
    what: object


def test_an_event_that_holds_more_than_data_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="holds data"):
        to_plain(Strange(what=print))


def test_a_question_is_equal_to_itself_after_it_was_written() -> None:
    asked = Asked("injector", 3)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=Asked) == asked
