"""What is checked before a training: TRL's loss is the model's own, windows and skipped positions are attended to."""

import copy
import random

import pytest
import torch
from datasets import Dataset
from support.prompting import TOKENIZER
from support.recipe_runs import needs_trl
from support.scored import bold_model
from support.tiny import ids

from family_models import IDS, tiny_model
from rope_patch.modeling.positions import skipped_positions
from rope_patch.training.checks import check_context_parallel, check_loss

pytestmark = [pytest.mark.slow, needs_trl]

# --- the loss


def trainer_of(model, folder):
    """TRL's trainer of a model, which has put a head of its own on it."""
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"input_ids": IDS[:, :24].tolist()})
    args = SFTConfig(str(folder), use_cpu=True, bf16=False, report_to=[])
    return SFTTrainer(model, args, train_dataset=rows, processing_class=copy.deepcopy(TOKENIZER))


@pytest.mark.parametrize("kind", ["llama4_text", "modernbert-decoder"])
def test_a_model_whose_loss_trl_does_not_know_is_refused(kind, tmp_path):
    """A head that transforms the states first, and a decoder that TRL takes for the whole model."""
    with pytest.raises(ValueError, match="loss"):
        check_loss(trainer_of(tiny_model(kind), tmp_path))
    check_loss(trainer_of(bold_model("gemma2"), tmp_path))


# --- rows that devices share


def test_sliding_windows_are_refused_where_devices_share_a_row(monkeypatch):
    check_context_parallel(bold_model("gemma3"))
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    check_context_parallel(bold_model())
    with pytest.raises(ValueError, match="attended to in full"):
        check_context_parallel(bold_model("gemma3"))


# --- positions and masks, as Trainer runs them: no cache, position_ids given


@torch.no_grad()
def run(model, batch):
    return model(**batch, use_cache=False).logits


@torch.no_grad()
def explicit(model, batch, allowed):
    """Logits under a mask written out: allowed (tokens, tokens), true where the row may look."""
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    return run(model, batch | {"attention_mask": mask})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_skipped_positions_keep_plain_causal_attention(attention):
    model = bold_model(attention=attention)
    rows = ids(24, batch=1, seed=3)
    positions = skipped_positions(random.Random(3), 24, 64, 3)[None]
    batch = {"input_ids": rows, "position_ids": positions, "attention_mask": torch.ones_like(rows)}
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    assert torch.allclose(run(model, batch), explicit(model, batch, causal), atol=1e-4)
    unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    assert not torch.allclose(run(model, unmasked), run(model, batch), atol=1e-3), "the row would fall apart"
