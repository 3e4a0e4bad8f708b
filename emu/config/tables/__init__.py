"""The tables of a configuration file, by family. `emu/config/schema.py` puts them together."""
