"""Evaluate models through quantized KV caches: the cost of a scheme, whether it is safe, and where it comes from."""
