"""A checkpoint at a longer context, in one call: candidates are measured, the best is chosen, written and checked."""
