"""Check whether the rotary table that a model uses is the one that is meant."""
