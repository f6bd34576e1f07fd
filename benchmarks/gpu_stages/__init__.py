"""The stages of ``benchmarks/gpu.py``: one module each, named in the order of their worth."""
