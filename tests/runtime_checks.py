"""The type checker that pytest puts on the functions of the modules named in pyproject.toml.

It is beartype with two rules of this package: an int is a valid float, as it is for every static checker; and
a dataclass takes what its own ``__post_init__`` converts or refuses (``PI(factor="8")``), so that the error a
user would see is the one that is tested.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_strict = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its arguments and result checked; a constructor is returned as it is."""
    return function if function.__name__ == "__init__" else _strict(function)
