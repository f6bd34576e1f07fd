"""What a reader computes is what the model computes; tests/families has every type."""

import pytest
import torch
import transformers
from support.scored import assert_read_as_it_is

from family_models import IDS, tiny_config, tiny_model
from rope_patch.modeling.after_decoder import DecoderOutput, decoder_path, modules_return
from rope_patch.modeling.reader import Reader, losses

ROW = IDS[:1, :24]
# What each does beyond a plain head: a multiplier, a divisor, a cap, a transform, a head over several embeddings.
AFTER_THE_DECODER = {
    "falcon_h1": {"lm_head_multiplier": 0.0195},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 1.5},
    "recurrent_gemma": {},
    "xlstm": {},
    "inkling_text": {},
    "bert": {"is_decoder": True},
    "llama4_text": {},
    "mllama": {},
    "opt": {},
}


def model_of(kind, **changes):
    if not changes:
        return tiny_model(kind)
    config = tiny_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", AFTER_THE_DECODER)
def test_logits_and_losses_are_those_of_the_model(kind):
    assert_read_as_it_is(model_of(kind, **AFTER_THE_DECODER[kind]))


def test_a_model_whose_parts_compute_something_else_is_refused():
    model = tiny_model("llama")
    own = model.forward

    def mixed(*args, **kwargs):
        output = own(*args, **kwargs)
        if output.logits.shape[1] > 1:  # what follows the decoder looks at how the states stand to each other
            output.logits = output.logits + kwargs["input_ids"][..., None] % 7
        return output

    model.forward = mixed
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be read by parts"):
        Reader(model)
    with pytest.raises(ValueError, match="ProphetNetForCausalLM"):
        Reader(tiny_model("prophetnet"))


def test_a_model_that_forgets_what_a_cache_holds_is_read_whole_alone():
    """Bamba's state of a first piece is lost to tokens that follow in a second one (transformers 5.23)."""
    model = tiny_model("bamba")
    reader = Reader(model)
    assert torch.isfinite(losses(reader, ROW, [1])[0, 1:]).all()
    with pytest.raises(ValueError, match="BambaForCausalLM cannot be read in pieces"):
        losses(reader, ROW, [1], chunk=12)
    assert Reader(tiny_model("falcon_h1")).difference("pieces") == 0


def test_a_sliding_model_that_reads_no_pieces_is_given_whole_texts(monkeypatch):
    monkeypatch.setattr("rope_patch.modeling.reader.SLIDING_CHUNK", 20)
    model = tiny_model("gemma2")
    assert Reader(model).chunk(60) == 20
    broken = tiny_model("gemma2")
    update = transformers.cache_utils.DynamicSlidingWindowLayer.update
    monkeypatch.setattr(
        "transformers.cache_utils.DynamicSlidingWindowLayer.update",
        lambda self, keys, values, *args, **kwargs: (*[2 * x for x in update(self, keys, values)],),
    )
    assert Reader(broken).chunk(60) == 60


def test_the_decoder_runs_again_after_its_output_was_given():
    model = tiny_model("opt")
    path = decoder_path(model)
    own = model.model.forward
    path[1].forward = path[1].forward  # as a hook of accelerate replaces it
    with torch.no_grad():
        expected = model(ROW).logits
        with pytest.raises(ZeroDivisionError), modules_return(path, DecoderOutput(torch.zeros(1, 3, 128))):
            assert model(ROW).logits.shape[1] == 3
            raise ZeroDivisionError
        assert torch.equal(model(ROW).logits, expected)
    assert model.model.forward == own and "forward" not in vars(path[0]) and "forward" in vars(path[1])
