"""Plug-ins of other trainers."""
