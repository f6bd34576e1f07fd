"""Helpers that several test files share: models, texts, processes, files."""
