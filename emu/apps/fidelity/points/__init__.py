"""Point tables: one row a measured load of a server, beside what emu says of it."""
