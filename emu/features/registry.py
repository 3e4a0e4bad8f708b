"""The features that there are, and those that replicas have.

The list itself is `FEATURES` in `emu/config/features.py`: a line for each module. A module is
loaded when a configuration may use it, and by what lists all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.config.features import config_parts, is_widened
from emu.config.schema import Config, SchedulerTable
from emu.features.base import Feature
from emu.features.modes import Seat


def all_features() -> tuple[Feature, ...]:
    """Every feature, in the order of the registry."""
    found = []
    for part in config_parts():
        assert isinstance(part, Feature), f"{part} is not a Feature"
        found.append(part)
    return tuple(found)


def module_of(feature: Feature) -> str:
    """The name of a feature's module or package: what conflicts call it by."""
    return type(feature).__module__.split(".")[2]


def features_on(config: Config, scheduler: SchedulerTable) -> tuple[Feature, ...]:
    """What replicas with this scheduler have."""
    return tuple(feature for feature in all_features() if feature.is_on(config, scheduler))


def check_features(features: Sequence[Feature], seat: Seat) -> None:
    """Refuse what the features of a table of replicas do not go with. InputError names the key."""
    if is_widened(seat.scheduler):
        for feature in all_features():
            if feature not in features:
                feature.check_unused(seat.scheduler, seat.source)
    names = [module_of(feature) for feature in features]
    for feature in features:
        feature.check(seat, names)
