"""Formats of a user's own module: one class in one file, which commands know by ``--import``."""

import json
import os
import sys

import pytest
import torch
from support.forks import forked
from support.pages import contributed
from support.prompting import TOKENIZER
from support.tiny import small

from rope_patch.cli import app
from rope_patch.kv_cache.blocks import fake_quantize
from rope_patch.kv_cache.formats import FORMATS, Format
from rope_patch.kv_cache.schemes import Side


def test_a_format_of_a_users_module_is_checked(tmp_path):
    """In a fork: the module that it imports is gone afterwards."""
    (tmp_path / "my_formats.py").write_text(contributed("ternary"))
    small().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    asked = "--formats ternary --lengths 40 --windows 2 --samples 1 --depths 0 --no-report --import my_formats -o out"

    def command():
        os.chdir(tmp_path)
        sys.argv = ["rope-patch", "kv-check", "model", *asked.split()]
        app.main()

    assert forked(command) == 0
    full, ternary = json.loads((tmp_path / "out" / "kv-check.json").read_text())["rows"]
    assert ternary["format_text"] == "k=ternary;v=ternary"
    assert ternary["bits"] == pytest.approx(1.585 + 16 / 8)  # a scale of 16 bits for each 8 features
    assert ternary["lengths"]["40"]["perplexity"] != full["lengths"]["40"]["perplexity"]


def test_a_format_may_work_in_place():
    class InPlace(Format, name="in place"):
        bits = 4

        def round(self, x, dim):
            return x.mul_(4).round_().div_(4)

    try:
        states = torch.randn(1, 2, 3, 16)
        before = states.clone()
        assert torch.equal(fake_quantize(states, Side("in place")), (before * 4).round() / 4)
        assert torch.equal(states, before)
    finally:
        FORMATS.pop("in place")


def test_a_format_that_returns_another_shape_is_named():
    class Swapped(Format, name="swapped"):
        bits = 4

        def round(self, x, dim):
            return x.mT

    try:
        with pytest.raises(ValueError, match=r"'swapped' must return the shape that it is given: \(1, 2, 3, 16\)"):
            fake_quantize(torch.randn(1, 2, 3, 16), Side("swapped"))
    finally:
        FORMATS.pop("swapped")
