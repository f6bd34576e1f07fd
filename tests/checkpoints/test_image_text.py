"""Folders of image-text models, which AutoModelForCausalLM does not load, through the calls that take a folder."""

import pytest
import torch
from support.round_trip import assert_same
from support.tiny import LLAMA, SIZE, logits
from transformers import AutoConfig, AutoModelForImageTextToText

import rope_patch
from rope_patch.checkpoints.folder_patch import patch_folder
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.checkpoints.source_files import how_to_load
from rope_patch.engines.compare_programs import REFERENCE, UNVERIFIED, compare_programs
from rope_patch.harness.model import RopePatchLM

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
FAMILIES = {
    "qwen3_vl": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}},
                 {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 4, "out_hidden_size": 64}),
    "mistral3": ({"model_type": "mistral"}, {**VISION, "num_hidden_layers": 1}),
    "smolvlm": ({"model_type": "llama"}, {**VISION, "num_hidden_layers": 1}),
}  # fmt: skip


def image_text_model(family, **rope_parameters):
    text, vision = FAMILIES[family]
    parameters = {**text.get("rope_parameters", {"rope_theta": 1e4, "rope_type": "default"}), **rope_parameters}
    text = {**SIZE, "head_dim": 8, "pad_token_id": 0, **text, "rope_parameters": parameters}
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(family, text_config=text, vision_config=vision)
    ).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def patched(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    image_text_model(request.param).save_pretrained(root / "plain")
    patch_folder(root / "plain", "yarn:factor=4", root / "patched", target_length=256)
    return request.param, root


def test_a_patched_folder_gives_the_logits_of_a_config_written_by_hand(patched):
    family, root = patched
    context = SIZE["max_position_embeddings"]
    by_hand = image_text_model(family, rope_type="yarn", factor=4.0, original_max_position_embeddings=context)
    for loaded in (
        AutoModelForImageTextToText.from_pretrained(root / "patched"),
        rope_patch.load(root / "patched"),
    ):
        assert type(loaded) is type(by_hand)
        assert_same(loaded, by_hand)
    assert not torch.equal(logits(by_hand), logits(rope_patch.load(root / "plain")))


@pytest.mark.usefixtures("reloads_fork")
def test_a_process_without_the_package_loads_it_as_the_command_says(patched):
    _, root = patched
    model = rope_patch.load(root / "patched")
    assert torch.equal(plain_logits(root / "patched", SIZE["vocab_size"]), probe_logits(model))
    assert how_to_load(root / "patched") == f"AutoModelForImageTextToText.from_pretrained({str(root / 'patched')!r})"


def test_doctor_reads_it_and_claims_nothing_of_programs_whose_code_was_not_compared(patched):
    _, root = patched
    assert rope_patch.doctor(root / "plain").ok
    assert rope_patch.doctor(root / "patched").ok
    reference, *others = compare_programs(root / "patched").rows
    assert reference.verdict == REFERENCE
    assert {row.verdict for row in others} == {UNVERIFIED}


def test_lm_eval_loads_it(patched):
    _, root = patched
    model = RopePatchLM(str(root / "patched"), tokenizer=str(LLAMA), device="cpu")
    assert_same(model.model, rope_patch.load(root / "patched"))
