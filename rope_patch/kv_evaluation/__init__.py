"""Models through quantized KV caches: measured, judged, attributed."""
