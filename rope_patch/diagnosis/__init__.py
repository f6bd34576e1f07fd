"""Is the rotary table that is used the one that is meant? One check after another, for any model."""
