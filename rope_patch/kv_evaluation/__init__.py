"""Models through quantized KV caches: what they cost, whether that is safe, and where it comes from."""
