"""Patch a model: locate its rotary module, encode new tables in its config, install them, verify them."""
