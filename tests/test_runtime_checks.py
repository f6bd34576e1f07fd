"""Shapes are checked at run time where they can be, and nowhere torch.compile traces."""

import importlib
import warnings

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from runtime_checks import checked
from torch import Tensor


@jaxtyped(typechecker=checked)
def scaled(inv_freq: Float[Tensor, " pairs"], factor: float) -> Float[Tensor, " pairs"]:
    """Stand for a function of a hooked module; it gives the shape away above 100."""
    return inv_freq / factor if factor <= 100 else inv_freq[:1]


@pytest.mark.parametrize("name", ["rope_patch.frequencies", "rope_patch.methods.method", "rope_patch.methods"])
def test_signatures_are_checked(name: str) -> None:
    assert "jaxtyping" in type(importlib.import_module(name).__loader__).__module__


def test_rotary_is_left_alone_for_torch_compile() -> None:
    assert "jaxtyping" not in type(importlib.import_module("rope_patch.tables").__loader__).__module__


@pytest.mark.parametrize(
    ("inv_freq", "factor"),
    [
        (torch.ones(2, 2), 2.0),
        (torch.ones(4), "2"),
        (torch.ones(4), 101),
    ],
    ids=["two axes", "text", "shape of the result"],
)
def test_a_wrong_shape_or_type_is_seen(inv_freq: Tensor, factor: float) -> None:
    with pytest.raises(TypeCheckError):
        scaled(inv_freq, factor)


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn("planted", UserWarning, stacklevel=1)
