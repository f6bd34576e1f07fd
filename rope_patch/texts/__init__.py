"""Texts to measure on: the user's own, and those that ship with this package."""
