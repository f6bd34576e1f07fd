"""Retrieval prompts from a short text, and the tokenizer that they are for."""

from transformers import AutoTokenizer

import rope_patch
from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.texts.builtin_text import builtin_text
from support.tiny import LLAMA

TOKENIZER = AutoTokenizer.from_pretrained(LLAMA)

ENGLISH = (rope_patch.data_path("assets") / "domains" / "english.txt").read_text(encoding="utf-8")

HAY = Haystack(builtin_text("haystack").documents[0])

MAKER = PromptMaker(TOKENIZER, HAY)

ANSWER = 5  # tokens of an answer: five digits, since the space before them is a token of the prompt


ROOM = {
    "json_kv": 400,
    "niah_multikey_3": 500,
    **dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"), 300),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery", "fwe"), 400),
    "vt": 900,
    "cwe": 600,
}
"""Number of tokens that the prompts of a task need in addition to those of other tasks, if it has five depths."""
