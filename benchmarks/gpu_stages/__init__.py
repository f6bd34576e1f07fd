"""The stages of ``benchmarks/gpu.py``: one module for each."""
