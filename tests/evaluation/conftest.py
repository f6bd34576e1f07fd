"""The bundled Llama, which most tests of this folder read."""

from __future__ import annotations

import pytest
import torch
from support.prompting import TOKENIZER
from support.tiny import LLAMA
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def bundled():
    """Its model in float32 and its tokenizer; a patch must be taken off again."""
    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval(), TOKENIZER


@pytest.fixture(scope="session")
def tokenizer():
    return TOKENIZER
