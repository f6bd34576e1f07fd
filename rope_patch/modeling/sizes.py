"""Sizes that engines and plans share; nothing here imports torch."""

SLICE = 256
"""Tokens whose logits exist at one time."""
