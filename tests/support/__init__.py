"""What several test files share: models, texts, processes, files."""
