"""`emu.study` and `emu study`: named systems over seeds and workloads, compared in pairs."""
