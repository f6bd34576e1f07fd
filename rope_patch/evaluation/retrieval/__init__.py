"""Retrieval: prompts with an answer hidden in them, and whether a model finds it."""
