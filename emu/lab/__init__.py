"""Laboratory: emu beside other simulators, defect for defect. No user needs it."""
