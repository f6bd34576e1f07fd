"""Retrieval prompts from a short text, and tiny models that read them."""

from __future__ import annotations

from transformers import AutoTokenizer

import rope_patch
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.text import builtin_text
from support.reference_recipe import recipe
from support.tiny import tiny_model

TOKENIZER = AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")

HAY = Haystack("\n\n".join(builtin_text("haystack").documents[:6]))

MAKER = PromptMaker(TOKENIZER, HAY)

PASSAGES = Haystack("\n\n".join(builtin_text("haystack").documents[6:14]))
"""A longer text, of which a task can hand out passages."""

ANSWER = 5  # five digits, in this tokenizer: the space before them is a token of the prompt


def bold(family="llama", **changes):
    """A tiny model with the tokenizer's vocabulary, whose attention is far from uniform."""
    if family == "gemma4":
        changes["vocab_size_per_layer_input"] = recipe.VOCABULARY
    special = {"bos_token_id": recipe.BOS, "eos_token_id": recipe.EOS, "pad_token_id": recipe.PAD}
    return tiny_model(family, vocab_size=recipe.VOCABULARY, initializer_range=0.2, **special, **changes)


ROOM = {
    "cwe": 750,
    "fwe": 100,
    "json_kv": 400,
    "niah_multikey_3": 400,
    "passage_retrieval": 900,
    "qa2": 100,
    "qa3": 150,
}
"""Tokens more than other tasks that the prompts of a task need where it is asked for at five depths."""


def hay_of(task):
    """The haystack to ask a task in."""
    return PASSAGES if task == "passage_retrieval" else HAY
