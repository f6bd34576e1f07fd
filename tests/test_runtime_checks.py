"""Shapes are checked at run time where they can be, and nowhere torch.compile traces."""

import importlib

import pytest


@pytest.mark.parametrize("name", ["rope_patch.frequencies", "rope_patch.methods.method", "rope_patch.methods"])
def test_signatures_are_checked(name: str) -> None:
    assert "jaxtyping" in type(importlib.import_module(name).__loader__).__module__


def test_rotary_is_left_alone_for_torch_compile() -> None:
    assert "jaxtyping" not in type(importlib.import_module("rope_patch.tables").__loader__).__module__
