"""Key-value caches as if they were quantized: schemes, quantizers, a streaming cache and one-pass attention."""
