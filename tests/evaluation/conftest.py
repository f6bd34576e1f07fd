"""The bundled Llama, which most tests of this folder read."""

import pytest
from support.prompting import TOKENIZER
from support.tiny import bundled_model


@pytest.fixture(scope="session")
def bundled():
    """Its model in float32 and its tokenizer; a patch must be taken off again."""
    return bundled_model(), TOKENIZER


@pytest.fixture(scope="session")
def tokenizer():
    return TOKENIZER
