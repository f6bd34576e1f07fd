"""The version of the package, by itself, so that everything can import it."""

__version__ = "0.4.0"
