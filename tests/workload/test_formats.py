"""The one list of formats (`emu/workload/formats/table.py`) and what a user may write."""

from typing import get_args

from emu.config.names import WorkloadFormat
from emu.workload.formats.table import formats


def test_a_configuration_knows_every_format_and_no_other():
    names = [one.name for one in formats()]
    assert len(set(names)) == len(names)
    assert sorted(get_args(WorkloadFormat)) == sorted(["auto", *names])
