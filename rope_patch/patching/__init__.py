"""A patch: found, encoded, put in, verified."""
