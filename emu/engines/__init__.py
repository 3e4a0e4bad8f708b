"""Serving engines by name and version: what `[engine]` chooses.

An engine is a bundle (`bundle.Engine`): host costs, graphs and front end (`EngineModel`), memory
rule, kernels, scheduler policies and defaults. `registry.py` lists them, `learned.py` reads the
files of `emu learn`. What the parts must answer is declared where it is asked
(`emu/kv/engine_memory.py`, `emu/latency/context.py`); they are bound where a world is planned
(`emu/cluster/plan.py`).
"""
