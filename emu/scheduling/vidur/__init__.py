"""Schedulers of Vidur: vllm_v0, sarathi, orca, lightllm, faster_transformer.

Each is one policy on top of `emu/scheduling/simple.py`.
"""
