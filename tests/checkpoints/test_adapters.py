"""Which tables an adapter belongs to is known of each adapter, in memory and on the disk, or an error says so."""

import re
import shutil

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from support.patches import edit_json, lora, patched_model, training_begun
from support.round_trip import assert_same
from support.subsets import full
from support.tiny import logits, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import rope_patch
from rope_patch import PatchError, checkpoints
from rope_patch.checkpoints.adapters import check_adapter_tensors
from rope_patch.checkpoints.folder_patch import patch_folder, verify_folder
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.cli.loading import load_tokenizer

# --- a second adapter -------------------------------------------------------------------------------------------------


def test_a_second_adapter_is_loaded_beside_the_first(root, expected):
    model = rope_patch.load(root / "one")
    again = rope_patch.load_adapter(model, root / "two", adapter_name="second")
    assert again is model
    assert torch.equal(logits(model), expected["one"])  # as in PEFT, it is used when it is asked for
    model.set_adapter("second")
    assert torch.equal(logits(model), expected["two"])
    rope_patch.verify(model)


@pytest.mark.parametrize(("name", "options"), [("two", {}), ("abf", {"adapter_name": "second"})])
def test_a_second_adapter_needs_a_name_of_its_own_and_the_same_tables(root, expected, name, options):
    model = rope_patch.load(root / "one")
    with pytest.raises(ValueError, match=r"adapter_name|abf"):
        rope_patch.load_adapter(model, root / name, **options)
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected["one"])


def test_adapters_of_transformers_own_are_not_wrapped(root):
    model = rope_patch.load(root / "base", "yarn:factor=4")
    model.load_adapter(root / "one")  # in transformers 5.24 `add_adapter` asks for a PEFT that is not published
    with pytest.raises(ValueError, match="transformers"):
        rope_patch.load_adapter(model, root / "one")


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_a_peft_model_inside_another_is_not_verified(root):
    twice = PeftModel.from_pretrained(rope_patch.load(root / "one"), root / "two", adapter_name="second")
    with pytest.raises(PatchError, match="PeftModel"):
        rope_patch.verify(twice)


# --- records of adapters ----------------------------------------------------------------------------------------------


def test_an_adapter_that_peft_loaded_is_not_saved_under_the_models_record(root, tmp_path):
    model = rope_patch.load(root / "one")
    model.load_adapter(root / "abf", adapter_name="b")
    with pytest.raises(PatchError, match="combined"):
        rope_patch.save(model, tmp_path / "both")
    assert not list(tmp_path.iterdir())
    rope_patch.save(model, tmp_path / "first", selected_adapters=["default"])  # whose own record is known
    assert checkpoints.read_record(tmp_path / "first").to_method() == rope_patch.parse("yarn:factor=4")


def test_an_adapter_in_training_may_hold_a_part_of_one_that_peft_loaded(root, tmp_path):
    model = lora(rope_patch.load(root / "base", "yarn:factor=4"))
    model.load_adapter(root / "abf", adapter_name="b")
    with pytest.raises(PatchError, match="nothing"):
        rope_patch.RopePatchCallback().on_train_begin(None, None, None, model=model)
    with pytest.raises(PatchError, match="default"):
        rope_patch.save(model, tmp_path / "out", selected_adapters=["default"])
    rope_patch.save(model, tmp_path / "out", selected_adapters=["default"], trust_adapters="default")
    assert_same(rope_patch.load(tmp_path / "out"), model)


def test_a_mixture_of_adapters_of_one_table_is_saved_when_it_is_trusted(root, tmp_path):
    model = rope_patch.load(root / "one")
    rope_patch.load_adapter(model, root / "two", adapter_name="second")
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mixed", combination_type="linear")
    with pytest.raises(PatchError, match="mixed"):
        rope_patch.save(model, tmp_path / "out")
    rope_patch.save(model, tmp_path / "out", trust_adapters=["mixed"])
    model.set_adapter("mixed")
    assert_same(rope_patch.load(tmp_path / "out" / "mixed"), model)
    with pytest.raises(ValueError, match="third"):
        rope_patch.save(model, tmp_path / "out", trust_adapters=["third"])


def test_an_adapter_is_trusted_after_a_training_with_the_callback_too(root, tmp_path):
    model = rope_patch.load(root / "one")
    training_begun(model)
    model.load_adapter(root / "two", adapter_name="b")
    rope_patch.save(model, tmp_path / "both", trust_adapters=["b"])
    assert checkpoints.read_record(tmp_path / "both" / "b").to_method() == rope_patch.parse("yarn:factor=4")


def test_an_adapter_is_not_saved_under_a_patch_put_in_later(root, tmp_path):
    model = rope_patch.load(root / "one")
    rope_patch.apply(model, "abf", replace=True)
    with pytest.raises(PatchError, match="yarn:factor=4"):
        rope_patch.save(model, tmp_path / "out")
    rope_patch.save(model, tmp_path / "out", trust_adapters=["default"])  # trained on under it, says the user
    assert checkpoints.read_record(tmp_path / "out").to_method().name == "abf"


# --- adapters whose tensors do not fit --------------------------------------------------------------------------------

WEIGHTS = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def tensors_of(change):
    """Return a function that changes the tensors of an adapter's folder."""

    def edit(folder):
        save_file({name: t.contiguous() for name, t in change(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS)

    return edit


def config_of(**keys):
    """Return a function that changes keys of an adapter's config."""
    return lambda folder: edit_json(folder / "adapter_config.json", lambda config: config.update(keys))


MISFITS = {
    "names of another class": (
        tensors_of(lambda t: {name.replace("model.layers", "model.language_model.layers"): t[name] for name in t}),
        f"{Q}.lora_A.weight",
    ),
    "other target_modules": (config_of(target_modules=["k_proj"]), f"{Q}.lora_A.weight"),
    "target_modules of no model": (config_of(target_modules=["attention"]), "attention"),
    "another rank": (config_of(r=8), "q_proj.lora_A"),
    "a rank below 1": (config_of(r=-1), "positive"),
    "a missing tensor": (tensors_of(lambda t: {name: t[name] for name in [*t][1:]}), "missing"),
    "one tensor more": (tensors_of(lambda t: t | {f"{Q}.lora_C.weight": torch.zeros(2)}), f"{Q}.lora_C.weight"),
    "another shape": (tensors_of(lambda t: {name: t[name][:, 1:] for name in t}), "q_proj.lora_A"),
}


@pytest.fixture(scope="module")
def small_adapter(root):
    """An adapter on the queries and values alone, without values of its own that would be lost unseen."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    rope_patch.save(peft.get_peft_model(rope_patch.load(root / "base", "yarn:factor=4"), config), root / "small")
    return root / "small"


@pytest.mark.parametrize("kind", MISFITS)
def test_an_adapter_that_does_not_fit_is_refused_by_name_and_changes_nothing(small_adapter, tmp_path, kind):
    change, named = MISFITS[kind]
    folder = shutil.copytree(small_adapter, tmp_path / "adapter")
    change(folder)
    model = rope_patch.load(small_adapter.parent / "base", "yarn:factor=4")
    checkpoints.write_record(rope_patch.verify(model).record, folder)  # the changed weights are those of the record
    modules = [*model.modules()]
    before = logits(model)
    for refuse in (
        rope_patch.load,
        rope_patch.verify,
        lambda source: rope_patch.load_adapter(model, source),
        lambda source: rope_patch.load_adapter(rope_patch.load(small_adapter), source, adapter_name="second"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            refuse(folder)
    assert all(ours is theirs for ours, theirs in zip(modules, model.modules(), strict=True))
    assert torch.equal(logits(model), before)
    diagnosis = rope_patch.doctor(folder)
    assert diagnosis.status == 1 and named in diagnosis.checks[0].found


def test_pickled_weights_are_compared_too(small_adapter, tmp_path):
    rope_patch.save(rope_patch.load(small_adapter), tmp_path, safe_serialization=False)
    rope_patch.load(tmp_path)
    config_of(target_modules=["k_proj"])(tmp_path)
    with pytest.raises(ValueError, match="missing"):
        rope_patch.load(tmp_path)


QV = ["q_proj", "v_proj"]
KINDS = {
    "modules_to_save": LoraConfig(target_modules=QV, modules_to_save=["lm_head", "norm"], init_lora_weights=False),
    "tied embeddings": LoraConfig(target_modules=QV, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "an embedding as target": LoraConfig(target_modules=[*QV, "embed_tokens"], init_lora_weights=False),
    "DoRA": LoraConfig(target_modules=QV, use_dora=True, init_lora_weights=False),
    "rank_pattern": LoraConfig(target_modules=QV, rank_pattern={"q_proj": 2}, init_lora_weights=False),
    "trainable_token_indices": LoraConfig(target_modules=QV, trainable_token_indices=[1, 2]),
    "replicated layers": LoraConfig(target_modules=QV, layer_replication=[[0, 1], [0, 2]]),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "BOFT": peft.BOFTConfig(target_modules=QV, boft_block_size=4),
    "VB-LoRA": peft.VBLoRAConfig(target_modules=QV, num_vectors=16, vector_length=8, save_only_topk_weights=True),
    "a learned prompt": peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
RARE = ("tied embeddings", "rank_pattern", "IA3", "BOFT", "VB-LoRA")


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("kind", [full(kind) if kind in RARE else kind for kind in KINDS])
def test_healthy_adapters_of_every_kind_fit_and_lack_no_tensor(root, tmp_path, kind):
    base = root / "base"
    tuned = peft.get_peft_model(rope_patch.load(base, "yarn:factor=4"), KINDS[kind]).eval()
    rope_patch.save(tuned, tmp_path)
    assert torch.allclose(logits(rope_patch.load(tmp_path)), logits(tuned), atol=1e-5)
    assert rope_patch.doctor(tmp_path).ok
    whole = load_file(tmp_path / WEIGHTS)
    # One of each of the adapter's own; the weights of a base_layer are the base's, which PEFT saves besides.
    for name in {tuple(name.split(".")[-2:]): name for name in whole if "base_layer" not in name}.values():
        save_file({other: whole[other] for other in whole if other != name}, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=r"missing|KeyError"):
            check_adapter_tensors(tmp_path, tuned.get_base_model())


def test_an_adapter_of_a_larger_vocabulary_fits_a_base_of_that_size(tmp_path):
    def base():
        model = rope_patch.load(tmp_path / "base", "yarn:factor=4")
        model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
        return model

    tiny_model().save_pretrained(tmp_path / "base")
    tuned = lora(base())
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        rope_patch.save(tuned, tmp_path / "adapter")
    assert_same(rope_patch.load_adapter(base(), tmp_path / "adapter"), tuned)
    with pytest.raises(ValueError, match="embed_tokens"):
        rope_patch.load(tmp_path / "adapter")


def test_tensors_that_peft_joins_are_compared_as_it_joins_them(tmp_path):
    """The experts of Mixtral have one matrix together in transformers 5, and had one each before."""
    size = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(**size, num_hidden_layers=1, num_local_experts=2, vocab_size=8))
    LoraConfig(r=2, target_modules=["w1", "w2", "w3"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    stored = {}
    for name, (wide, high) in {"w1": (8, 12), "w3": (8, 12), "w2": (12, 8)}.items():
        for expert in range(2):
            path = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            stored |= {f"{path}.lora_A.weight": torch.ones(2, wide), f"{path}.lora_B.weight": torch.ones(high, 2)}
    save_file(stored, tmp_path / WEIGHTS)
    check_adapter_tensors(tmp_path, model)
    tensors_of(lambda t: {name.replace("model.layers", "layers"): t[name] for name in t})(tmp_path)
    with pytest.raises(ValueError, match="missing"):
        check_adapter_tensors(tmp_path, model)


@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_an_adapter_that_needs_the_weights_of_its_base_is_loaded_with_a_warning(root, tmp_path):
    base = rope_patch.load(root / "base", "yarn:factor=4")
    tuned = peft.get_peft_model(base, peft.AdamssConfig(target_modules=QV)).eval()
    rope_patch.save(tuned, tmp_path)
    with pytest.warns(UserWarning, match="not compared"):
        assert torch.allclose(logits(rope_patch.load(tmp_path)), logits(tuned), atol=1e-5)


class MoreThanAConfig(LlamaForCausalLM):
    """A class of the user's own, of which no copy is built from the config alone."""

    def __init__(self, config, *, own):
        super().__init__(config)


def test_an_adapter_on_a_class_of_ones_own_is_loaded_with_a_warning(root, expected):
    model = MoreThanAConfig(tiny_model().config, own=True)
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(root / "base").state_dict())
    rope_patch.apply(model, "yarn:factor=4")
    with pytest.warns(UserWarning, match="not compared"):
        assert torch.equal(logits(rope_patch.load_adapter(model, root / "one")), expected["one"])


@pytest.mark.parametrize("base", ["{tmp_path}/gone", "out/model"])
def test_a_missing_base_is_named_as_the_one_that_the_adapter_names(small_adapter, tmp_path, monkeypatch, base):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = shutil.copytree(small_adapter, tmp_path / "adapter")
    config_of(base_model_name_or_path=base.format(tmp_path=tmp_path))(folder)
    for call in (rope_patch.load, rope_patch.doctor, rope_patch.verify, rope_patch.inspect, load_tokenizer):
        with pytest.raises((ValueError, OSError), match=f"the base that {folder} names: .*(gone|out/model)"):
            call(str(folder))


# --- records on the disk ----------------------------------------------------------------------------------------------


def test_a_record_belongs_to_the_weights_beside_it(root, tmp_path):
    patched = lora(rope_patch.load(root / "base", "yarn:factor=4"))
    rope_patch.save(patched, tmp_path)
    plain = lora(AutoModelForCausalLM.from_pretrained(root / "base"), seed=7)
    plain.save_pretrained(tmp_path)  # over the patched one: the record stays in the folder
    for attempt in (rope_patch.load, lambda folder: rope_patch.load_adapter(patched.unload(), folder)):
        with pytest.raises(PatchError, match="beside"):
            attempt(tmp_path)


def test_an_adapter_that_peft_saved_gets_a_record_as_the_error_says(root, tmp_path):
    patched = lora(rope_patch.load(root / "base", "yarn:factor=4"))
    patched.save_pretrained(tmp_path / "bare")
    with pytest.raises(PatchError, match=r"rope_patch\.save"):
        rope_patch.load_adapter(patched.unload(), tmp_path / "bare")
    again = peft.PeftModel.from_pretrained(rope_patch.load(root / "base", "yarn:factor=4"), tmp_path / "bare")
    rope_patch.save(again, tmp_path / "saved", trust_adapters=["default"])
    rope_patch.load(tmp_path / "saved")


def test_a_record_that_names_no_weights_does_not_count_for_an_adapter(root, tmp_path):
    tuned = rope_patch.load(root / "one")
    rope_patch.save(tuned, tmp_path / "out")
    edit_json(tmp_path / "out" / "rope_patch.json", lambda data: data.pop("adapter_weights"))
    with pytest.raises(PatchError, match="adapter"):
        rope_patch.load(tmp_path / "out")
    checkpoints.write_record(rope_patch.verify(tuned).record, tmp_path / "out")
    rope_patch.load(tmp_path / "out")


def test_an_adapter_in_the_folder_of_its_base_model(tmp_path, no_links):
    """transformers puts such an adapter on the model it loads, on whatever table."""
    tiny_model().save_pretrained(tmp_path / "both")
    (tmp_path / "both" / "notes").mkdir()
    tuned = lora(rope_patch.load(tmp_path / "both", "yarn:factor=4"))
    rope_patch.save(tuned, tmp_path / "both")
    model = rope_patch.load(tmp_path / "both")
    assert_same(model, tuned)
    assert verify_folder(tmp_path / "both").to_method() == rope_patch.parse("yarn:factor=4")
    for command in (
        lambda folder: model_without_weights(folder),
        lambda folder: patch_folder(folder, "abf", tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match="holds an adapter"):
            command(tmp_path / "both")
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "both")), logits(tuned))


# --- adapters loaded for training -------------------------------------------------------------------------------------


def load_by_peft(folder, **options):
    base = rope_patch.load(folder.parent / "base", "yarn:factor=4")
    return PeftModel.from_pretrained(base, folder, **options)


@pytest.mark.parametrize("loader", [rope_patch.load, load_by_peft])
def test_an_adapter_loaded_for_training_is_trained_and_saved(root, tmp_path, loader):
    model = loader(root / "one", is_trainable=True)
    weights = [p for name, p in model.named_parameters() if "lora" in name]
    assert weights and all(p.requires_grad for p in weights)
    for p in weights:
        p.data += 0.3
    rope_patch.save(model.eval(), tmp_path)
    assert_same(rope_patch.load(tmp_path), model)


def test_a_compiled_peft_model_is_saved(root, expected, tmp_path):
    rope_patch.save(torch.compile(rope_patch.load(root / "one"), backend="eager"), tmp_path)
    assert torch.equal(logits(rope_patch.load(tmp_path)), expected["one"])


# --- where the files of an adapter lie --------------------------------------------------------------------------------


def test_the_record_of_a_subfolder_is_that_of_the_adapter_in_it(root, expected, tmp_path):
    for where, name in ((tmp_path, "abf"), (tmp_path / "inner", "one")):
        shutil.copytree(root / name, where, dirs_exist_ok=True)
    assert torch.equal(logits(rope_patch.load(tmp_path, subfolder="inner")), expected["one"])
    assert checkpoints.read_record(tmp_path, subfolder="inner") == checkpoints.read_record(tmp_path / "inner")
    for method in ("abf", None):
        with pytest.raises(PatchError, match="trained under yarn"):
            rope_patch.load_adapter(rope_patch.load(root / "base", method), tmp_path, subfolder="inner")


def test_weights_of_another_format_go_with_the_adapter_they_belong_to(root, expected, tmp_path):
    """PEFT prefers safetensors: an older file of those would be loaded in place of the new ``adapter_model.bin``."""
    rope_patch.save(rope_patch.load(root / "one"), tmp_path)
    rope_patch.save(rope_patch.load(root / "two"), tmp_path, safe_serialization=False)
    assert [path.name for path in tmp_path.glob("adapter_model.*")] == ["adapter_model.bin"]
    assert torch.equal(logits(rope_patch.load(tmp_path)), expected["two"])


def test_the_revision_that_an_adapter_names_is_its_bases(tmp_path, monkeypatch):
    """The one it names, unless another is asked for."""
    tiny_model().save_pretrained(tmp_path / "base")
    rope_patch.save(lora(rope_patch.load(tmp_path / "base", "yarn:factor=4")), tmp_path / "adapter")
    edit_json(tmp_path / "adapter" / "adapter_config.json", lambda config: config.update(revision="v1"))
    asked = []
    stock = AutoModelForCausalLM.from_pretrained

    def noted(source, **options):
        asked.append(options.pop("revision", None))
        return stock(source, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    rope_patch.load(tmp_path / "adapter")
    rope_patch.load(tmp_path / "adapter", revision="v2")
    assert asked == ["v1", "v2"]


# --- the model card that PEFT writes ----------------------------------------------------------------------------------


def notes_in(folder):
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "rope_patch.load" in line]


def test_the_model_card_says_once_how_the_adapter_is_loaded(tmp_path):
    model = patched_model("yarn:factor=4")
    tuned = lora(model)
    tuned.save_pretrained(tmp_path / "plain")
    plain = (tmp_path / "plain" / "README.md").read_text(encoding="utf-8")
    rope_patch.save(tuned, tmp_path / "saved")
    text = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    (note,) = notes_in(tmp_path / "saved")
    assert "yarn:factor=4" in note
    header, body = plain.rsplit("---\n", 1)
    assert text == f"{header}---\n\n{note}\n\n{body.strip()}\n"  # the rest is as PEFT writes it
    training_begun(tuned)
    for _ in range(2):
        tuned.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "README.md").read_text(encoding="utf-8") == text


def test_the_model_card_that_a_folder_has_keeps_its_text_and_gets_the_patch_of_today(tmp_path):
    model = tiny_model()
    patch = rope_patch.apply(model, "yarn:factor=4")
    tuned = lora(model)
    rope_patch.save(tuned, tmp_path)
    card = tmp_path / "README.md"
    card.write_text(card.read_text(encoding="utf-8") + "\nTrained on my own poems.\n", encoding="utf-8")
    patch.restore()
    rope_patch.apply(model, "pi:factor=2")
    rope_patch.save(tuned, tmp_path)
    assert "my own poems" in card.read_text(encoding="utf-8")
    (note,) = notes_in(tmp_path)
    assert "pi:factor=2" in note


def test_the_card_of_a_whole_model_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("My model.", encoding="utf-8")
    model = patched_model("yarn:factor=4")
    training_begun(model)
    model.save_pretrained(tmp_path)  # which writes into the folder itself
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "My model."
