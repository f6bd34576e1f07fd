"""Simulate quantized key-value caches: schemes, formats, a streaming cache and one-pass attention."""
