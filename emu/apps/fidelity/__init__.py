"""The fidelity board: measured runs of real servers, emulated and compared."""
