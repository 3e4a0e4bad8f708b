"""Experts that many ranks share: exchange of tokens, balance of loads, overlap, kernels.

`setting.py` reads what `[engine]` says, `make.py` builds the parts, which `emu/latency/roofline.py`
asks through `RoutedExperts` (`emu/latency/layer_costs.py`).
"""
