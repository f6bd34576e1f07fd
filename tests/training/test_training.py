"""Training with TRL: its loss is the model's own, documents of a row stay apart, positions and masks stay causal."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from datasets import Dataset
from support.prompting import TOKENIZER
from support.recipe_runs import needs_trl
from support.scored import bold_model
from support.tiny import ARCHITECTURES, ids
from transformers import AutoModelForCausalLM, MixtralConfig

from family_models import IDS, tiny_model
from rope_patch.modeling.positions import skipped_positions
from rope_patch.training.checks import check_context_parallel, check_loss

pytestmark = [pytest.mark.slow, needs_trl]

IGNORED_LABEL = -100


@pytest.fixture
def sft(tmp_path):
    """A function that builds TRL's trainer for a model and rows, or texts."""
    from trl import SFTConfig, SFTTrainer

    def build(model, dataset, tokenizer=TOKENIZER, **options):
        given = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 2, "logging_steps": 1, "seed": 3}
        given |= {"gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True}
        args = SFTConfig(str(tmp_path / "out"), **(given | options))
        return SFTTrainer(model, args, train_dataset=dataset, processing_class=copy.deepcopy(tokenizer))

    return build


# --- the loss


def fused(model):
    """The model with the head that SFTTrainer gives it."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    return model


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(family):
    model = bold_model(family)
    rows = ids(40, batch=3)
    labels = rows.clone()
    labels[0, :7] = IGNORED_LABEL
    labels[2, 30:] = IGNORED_LABEL
    expected = model(rows, labels=labels, use_cache=False).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = fused(model)(rows, labels=labels, fused_lm_head=True).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(dict(model.named_parameters())[name].grad, gradient, atol=1e-5), name


def test_the_loss_of_the_router_is_trained():
    config = MixtralConfig(
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 96, "num_local_experts": 4},
        **{"output_router_logits": True, "router_aux_loss_coef": 0.1, "attn_implementation": "eager"},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    rows = IDS[:, :32]
    own = model(input_ids=rows, labels=rows)
    assert own.aux_loss > 0
    own.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = fused(model)(input_ids=rows, labels=rows, fused_lm_head=True).loss
    loss.backward()
    assert loss.item() == pytest.approx(own.loss.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-5), name


@pytest.mark.parametrize("kind", ["llama4_text", "modernbert-decoder"])
def test_a_model_whose_loss_trl_does_not_know_is_refused(kind, sft):
    """A head that transforms the states first, and a decoder that TRL takes for the whole model."""
    rows = Dataset.from_dict({"input_ids": IDS[:, :24].tolist()})
    with pytest.raises(ValueError, match="loss"):
        check_loss(sft(tiny_model(kind), rows))
    check_loss(sft(bold_model("gemma2"), rows))


# --- the options of TRL that a run leans on


def rows_of(count, size=24):
    return Dataset.from_dict({"input_ids": [ids(size, batch=1, seed=i)[0].tolist() for i in range(count)]})


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_noise_on_the_embeddings_is_an_option_of_trl(sft):
    plain = sft(bold_model(), rows_of(16))
    plain.train()
    noisy = sft(bold_model(), rows_of(16), neftune_noise_alpha=15)
    noisy.train()
    assert losses_of(plain)[0] != pytest.approx(losses_of(noisy)[0], abs=1e-4)
    assert torch.isfinite(torch.tensor(losses_of(noisy))).all()


CHAT = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m.role + '>\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<eos>' }}{% endgeneration %}{% else %}{{ m.content + '<eos>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def test_only_the_turns_of_the_assistant_are_learned(sft):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = CHAT
    turns = [("user", "hi 12"), ("assistant", "yo man"), ("user", "34"), ("assistant", "5")]
    talk = {"messages": [{"role": role, "content": text} for role, text in turns]}
    trainer = sft(
        AutoModelForCausalLM.from_pretrained(TOKENIZER.name_or_path),
        Dataset.from_list([talk] * 4),
        tokenizer,
        assistant_only_loss=True,
        packing=True,
        packing_strategy="bfd_split",
        max_length=256,
    )
    row = trainer.train_dataset[0]
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED_LABEL]
    assert tokenizer.decode(learned) == "yo man<eos>5<eos>" * len(row["seq_lengths"])
    trainer.train()
    assert torch.isfinite(torch.tensor(losses_of(trainer))).all()


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(attention):
    """As TRL packs and collates them; the longest document is split, and its rest is a document of its own."""
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model = bold_model(attention=attention)
    tokens = ids(29, batch=1)[0].tolist()
    documents = [tokens[:5], tokens[5:17], tokens[17:]]
    (row,) = pack_dataset(Dataset.from_dict({"input_ids": documents, "labels": documents}), 24, "bfd_split").select([0])
    assert sum(row["seq_lengths"]) == 24 and len(row["seq_lengths"]) == 2
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row])
    begins = [0, row["seq_lengths"][0]]
    assert (batch["labels"][0] == IGNORED_LABEL).nonzero().flatten().tolist() == begins
    segment = torch.tensor([0] * row["seq_lengths"][0] + [1] * row["seq_lengths"][1])
    allowed = torch.ones(24, 24, dtype=torch.bool).tril() & (segment[:, None] == segment)
    batch.pop("labels")
    plain = {name: batch[name] for name in ("input_ids", "position_ids")}
    assert torch.allclose(run(model, batch), explicit(model, plain, allowed), atol=1e-4)
    joined = torch.ones(24, 24, dtype=torch.bool).tril()
    assert not torch.allclose(run(model, batch), explicit(model, plain, joined), atol=1e-3)
