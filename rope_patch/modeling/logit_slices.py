"""How many logits exist at one time, for what computes them and for plans; nothing here imports torch."""

LOGITS_AT_ONCE = 256
"""Number of tokens whose logits exist at one time."""
