"""Evaluate models through quantized KV caches: the cost of a format, whether it is safe, and where it comes from."""
