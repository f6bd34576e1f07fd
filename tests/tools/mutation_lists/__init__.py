"""The defects that `mutations.py` plants: small changes that raise nothing and give other results."""

from __future__ import annotations

from mutation_lists.of_models import CHECKPOINTS, KV_CACHE, METHODS, PATCHING
from mutation_lists.of_runs import EVALUATION, TRAINING

MUTATIONS = (*METHODS, *PATCHING, *CHECKPOINTS, *KV_CACHE, *EVALUATION, *TRAINING)
