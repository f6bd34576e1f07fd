"""Figures: arrays in, matplotlib out."""
