"""A table that is fitted to text, as a candidate."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from rope_patch.fitting import fit, held_out_spec
from rope_patch.fitting.fit_cost import tokens_to_fit
from rope_patch.modeling.scoring import model_hash
from rope_patch.options.fit import FitSettings
from rope_patch.runtime.result_cache import ResultCache, key

FIT_POSITIONS = "pose"


def fit_candidate(model: nn.Module, tokenizer: PreTrainedTokenizerBase, length: int, resume: Path) -> tuple[str, bool]:
    """Fit a table to text at skipped positions; the model is left as it was.

    Returns:
        The table as a method string, and whether it is better than its start; else it is the start.
    """
    cache, vocabulary = ResultCache(resume), tokenizer.get_vocab()
    name = key(fitted=model_hash(model), vocabulary=vocabulary, length=length, positions=FIT_POSITIONS)
    if name not in cache:
        patch = fit(model, tokenizer, target_length=length, positions=FIT_POSITIONS)
        # The fitted table is a candidate like the others: it is patched when it is measured.
        patch.restore()
        cache[name] = [str(patch.method), patch.chosen != "start"]
    table, better = cache[name]
    return table, better


def tokens_to_fit_candidate(model: nn.Module, length: int) -> int:
    """Return how many tokens :func:`fit_candidate` reads."""
    return tokens_to_fit(held_out_spec(model, length), FitSettings(length).steps, FIT_POSITIONS)
