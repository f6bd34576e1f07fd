"""Figures: arrays in, matplotlib out."""


def require_matplotlib() -> None:
    """Raise ModuleNotFoundError where figures could not be drawn, before anything is measured for them."""
    import matplotlib  # noqa: F401
