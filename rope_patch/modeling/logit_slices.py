"""The number of logits that exist at one time, which plans need, too; a plan is made without torch."""

LOGITS_AT_ONCE = 256
"""Number of tokens whose logits exist at one time."""
