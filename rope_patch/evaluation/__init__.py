"""Perplexity and retrieval under a patch, always together: perplexity hides what retrieval shows."""
