"""A GGUF file is patched, restored and verified as a file: only its table changes, and no weights are loaded.

What a file holds is read with gguf's own reader, and what it computes with transformers'.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from fresh import stock_logits
from gguf_files import rewritten, saved
from subsets import byte_level_llama
from tiny import LLAMA3, ids, logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import PatchError

gguf = pytest.importorskip("gguf")

from rope_patch.checkpoints.gguf_file import Key, Piece, open_gguf, write_gguf  # noqa: E402
from rope_patch.checkpoints.gguf_patch import BEFORE_KEY, patch_gguf, restore_gguf  # noqa: E402
from rope_patch.checkpoints.gguf_table import RECORD_KEY  # noqa: E402
from rope_patch.exporting.gguf import export_gguf  # noqa: E402

TOKENS = ids(48) % 96
Q4_1 = gguf.GGMLQuantizationType.Q4_1


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")


def quantized(path, out):
    """A copy of a file whose matrices are Q4_1."""
    pieces = [
        Piece(p.name, p.shape, Q4_1, lambda p=p: gguf.quants.quantize(p.read(), Q4_1)) if len(p.shape) > 1 else p
        for p in open_gguf(path).pieces
    ]
    return rewritten(path, out, [Key.of("general.file_type", 3, "UINT32")], pieces)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A GGUF of the tiny Llama in Q4_1: context 64, base 1e4, heads of 16."""
    folder = tmp_path_factory.mktemp("base")
    plain = export_gguf(saved(folder / "llama"), folder / "plain.gguf", dtype="float32", tokenizer=tokenizer)
    return quantized(plain, folder / "base.gguf")


@pytest.mark.parametrize("alignment", [32, 256])
def test_tensors_of_any_size_are_where_the_file_says(tmp_path, alignment):
    arrays = {f"of_{size}": np.arange(size, dtype=np.float32) for size in (1, 9, 64)}
    pieces = [Piece(n, a.shape, gguf.GGMLQuantizationType.F32, lambda a=a: a) for n, a in arrays.items()]
    stated = [Key.of("general.alignment", alignment, "UINT32")]
    path = write_gguf(tmp_path / "any.gguf", stated, pieces, alignment=alignment)
    assert tensors(path) == {name: ("F32", array.tobytes()) for name, array in arrays.items()}


def tensors(path):
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


def keys(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in name}


def stated(path, architecture, **values):
    """A file with the metadata of an architecture and no layers."""
    numbers = {"embedding_length": 64, "attention.head_count": 4, "context_length": 64, **values}
    entries = [Key.of(f"{architecture}.{name}", value, "UINT32") for name, value in numbers.items()]
    return write_gguf(path, [Key.of("general.architecture", architecture, "STRING"), *entries], [])


# --- apply


@pytest.mark.parametrize("method", ["yarn:factor=4", "p_rope:p=0.5"])
def test_every_tensor_but_the_factors_is_the_same_bytes(base, tmp_path, method):
    patch_gguf(base, method, tmp_path / "out.gguf")
    written = tensors(tmp_path / "out.gguf")
    assert written.pop("rope_freqs.weight")[0] == "F32"
    assert written == tensors(base) and "Q4_1" in {kind for kind, _ in written.values()}


def test_every_key_but_those_of_the_table_is_kept_in_its_place(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", target_length=256)
    before, after = keys(base), keys(tmp_path / "out.gguf")
    assert {name for name in after if after[name] != before.get(name)} == {
        *("llama.context_length", "llama.rope.scaling.attn_factor", RECORD_KEY, BEFORE_KEY)
    }
    assert after["llama.context_length"] == 256
    assert [name for name in after if name in before] == list(before)


@pytest.mark.parametrize("method", ["yarn:factor=4", "pi:factor=4", "abf", "p_rope:p=0.5", "nope"])
def test_the_table_is_the_one_that_export_writes_of_the_patched_checkpoint(base, tmp_path, tokenizer, method):
    patch_gguf(base, method, tmp_path / "out.gguf", target_length=256)
    model = AutoModelForCausalLM.from_pretrained(base.parent / "llama")
    rope_patch.apply(model, method, target_length=256)
    rope_patch.save(model, tmp_path / "folder", tokenizer=False)
    reference = export_gguf(tmp_path / "folder", tmp_path / "reference.gguf", tokenizer=tokenizer, dtype="float32")
    assert tensors(tmp_path / "out.gguf").get("rope_freqs.weight") == tensors(reference).get("rope_freqs.weight")
    own, theirs = keys(tmp_path / "out.gguf"), keys(reference)
    rotary = [name for name in {*own, *theirs} if ".rope." in name or "context" in name]
    assert {name: own.get(name) for name in rotary} == {name: theirs.get(name) for name in rotary}


def test_the_patched_file_computes_as_transformers_does_with_the_method(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf")
    reference = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name).eval()
    plain = logits(reference, TOKENS)
    rope_patch.apply(reference, "yarn:factor=4")
    model = rope_patch.load(tmp_path / "out.gguf").eval()
    assert torch.equal(logits(model, TOKENS), logits(reference, TOKENS))
    assert not torch.allclose(plain, logits(reference, TOKENS), atol=1e-3)


def test_a_factor_that_is_left_out_is_taken_from_the_target(base, tmp_path):
    change = patch_gguf(base, "yarn", tmp_path / "out.gguf", target_length=192)
    assert change.method == rope_patch.Yarn(factor=3)
    with pytest.raises(ValueError, match="target_length 32 is shorter"):
        patch_gguf(base, "yarn", tmp_path / "short.gguf", target_length=32)


def test_a_method_on_llama_3s_own_factors_keeps_them(tmp_path, tokenizer):
    """llama.cpp's converter writes Llama 3.1's smoothing as factors; zeroing pairs leaves the others smoothed."""
    folder = saved(tmp_path / "folder", rope_parameters=LLAMA3, max_position_embeddings=512)
    own = export_gguf(folder, tmp_path / "own.gguf", dtype="float32", tokenizer=tokenizer)
    patch_gguf(own, "p_rope:p=0.5", tmp_path / "out.gguf")
    smoothed = AutoModelForCausalLM.from_pretrained(folder)
    rope_patch.apply(smoothed, "p_rope:p=0.5")
    model = rope_patch.load(tmp_path / "out.gguf").eval()
    assert torch.allclose(logits(model, TOKENS), logits(smoothed.eval(), TOKENS), atol=1e-5)
    with pytest.raises(ValueError, match="yarn"):  # as on the checkpoint itself
        patch_gguf(own, "yarn:factor=2", tmp_path / "no.gguf")


def test_a_patched_file_is_patched_anew_only_where_asked(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "yarn.gguf")
    with pytest.raises(PatchError, match="already patched with yarn:factor=4"):
        patch_gguf(tmp_path / "yarn.gguf", "pi:factor=2", tmp_path / "pi.gguf")
    patch_gguf(tmp_path / "yarn.gguf", "pi:factor=2", tmp_path / "pi.gguf", replace=True)
    patch_gguf(base, "pi:factor=2", tmp_path / "direct.gguf")
    assert (tmp_path / "pi.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()


def test_graphs_without_factors_take_another_base_alone(tmp_path):
    own = stated(tmp_path / "qwen3.gguf", "qwen3")
    with pytest.raises(ValueError, match=r"graph for qwen3 reads no rotary factors .* base alone can be applied"):
        patch_gguf(own, "yarn:factor=4", tmp_path / "out.gguf")
    patch_gguf(own, "abf:rope_theta=50000", tmp_path / "out.gguf")
    assert keys(tmp_path / "out.gguf")["qwen3.rope.freq_base"] == 50000.0


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("gemma3", "a table for each layer type: llama.cpp's graph for it reads no rotary factors"),
        ("gemma4", "a table for each layer type: patch the checkpoint and put its table onto this file"),
        ("stablelm", "a GGUF of 'stablelm': whether llama.cpp reads another table there was never checked"),
    ],
)
def test_families_it_cannot_patch_as_files(tmp_path, architecture, message):
    with pytest.raises(ValueError, match=message):
        patch_gguf(stated(tmp_path / "m.gguf", architecture), "abf", tmp_path / "out.gguf")


def test_phi3_has_its_factors_in_two_tensors(tmp_path):
    patch_gguf(stated(tmp_path / "phi3.gguf", "phi3"), "pi:factor=4", tmp_path / "out.gguf")
    written = tensors(tmp_path / "out.gguf")
    assert written["rope_factors_long.weight"] == written["rope_factors_short.weight"]
    assert rope_patch.verify(tmp_path / "out.gguf").method == "pi:factor=4"


@pytest.mark.parametrize("option", [{"layer_types": ["full_attention"]}, {"freeze_at": 64}, {"keep_edits": True}])
def test_options_that_a_file_has_no_use_for(base, tmp_path, option):
    with pytest.raises(ValueError, match="is patched as the one table it holds, without options such as --"):
        patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", **option)


# --- what comes in, what is left behind


def test_places_it_does_not_write_to(base, tmp_path):
    own = tmp_path / "own.gguf"
    own.write_bytes(base.read_bytes())
    with pytest.raises(ValueError, match="is the GGUF file itself"):
        patch_gguf(own, "nope", own, overwrite=True)
    with pytest.raises(FileExistsError, match="--force"):
        patch_gguf(base, "nope", own)
    with pytest.raises(ValueError, match=r"must be a file \*\.gguf, got"):
        patch_gguf(base, "nope", tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match="no folder"):
        patch_gguf(base, "nope", tmp_path / "nowhere" / "out.gguf")
    with pytest.raises(FileNotFoundError, match="no file"):
        patch_gguf(tmp_path / "missing.gguf", "nope", tmp_path / "out.gguf")
    assert own.read_bytes() == base.read_bytes() and [path.name for path in tmp_path.iterdir()] == ["own.gguf"]


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.95])
def test_a_truncated_file_is_refused(base, tmp_path, share):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(base.read_bytes()[: int(share * base.stat().st_size)])
    with pytest.raises(ValueError, match="truncated or damaged"):
        patch_gguf(cut, "nope", tmp_path / "out.gguf")


def test_an_interrupt_leaves_nothing(base, tmp_path):
    def interrupt(written, total):
        assert any(path.stat().st_size for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", on_bytes=interrupt)
    assert not list(tmp_path.iterdir())


def test_progress_ends_with_every_byte_of_the_tensors(base, tmp_path):
    reports = []
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", on_bytes=lambda *counts: reports.append(counts))
    total = sum(tensor.n_bytes for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors)
    assert reports[-1] == (total, total) and reports == sorted(reports)


def test_keys_that_ggufs_own_writer_refuses_are_kept(base, tmp_path):
    """An empty array, and an array of arrays."""
    import struct

    def array(name, *content):
        raw = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", 9) + b"".join(content)
        return Key.read(raw)

    empty = array("some.empty", struct.pack("<IQ", 8, 0))
    nested = array("some.nested", struct.pack("<IQ", 9, 2), *(struct.pack("<IQ2h", 3, 2, i, i + 1) for i in (1, 5)))
    assert (empty.value, nested.value) == ([], [[1, 2], [5, 6]])
    own = rewritten(base, tmp_path / "own.gguf", [empty, nested])
    patch_gguf(own, "yarn:factor=4", tmp_path / "out.gguf")
    assert open_gguf(tmp_path / "out.gguf").value("some.nested") == [[1, 2], [5, 6]]
    assert empty.raw + nested.raw in (tmp_path / "out.gguf").read_bytes()


def test_a_header_is_read_as_ggufs_own_reader_reads_it(base):
    opened, reference = open_gguf(base), gguf.GGUFReader(base)
    assert {name: key.value for name, key in opened.keys.items()} == keys(base)
    read = {piece.name: (piece.kind, piece.read().shape, piece.read().tobytes()) for piece in opened.pieces}
    assert read == {t.name: (t.tensor_type, t.data.shape, t.data.tobytes()) for t in reference.tensors}
    assert opened.weights == "Q4_1"


# --- restore


@pytest.mark.parametrize("method", ["yarn:factor=4", "p_rope:p=0.5", "abf"])
def test_restoring_gives_the_original_file_to_the_last_byte(base, tmp_path, method):
    patch_gguf(base, method, tmp_path / "out.gguf", target_length=256)
    assert (tmp_path / "out.gguf").read_bytes() != base.read_bytes()
    restore_gguf(tmp_path / "out.gguf", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == base.read_bytes()


def test_restoring_gives_back_factors_and_scaling_keys_of_other_tools(base, tmp_path, tokenizer):
    folder = saved(tmp_path / "folder", rope_parameters=LLAMA3, max_position_embeddings=512)
    factors = export_gguf(folder, tmp_path / "factors.gguf", dtype="float32", tokenizer=tokenizer)
    linear = [
        Key.of("llama.rope.scaling.type", "linear", "STRING"),
        Key.of("llama.rope.scaling.factor", 2.0, "FLOAT32"),
    ]
    for name, own in (("a", factors), ("b", rewritten(base, tmp_path / "linear.gguf", linear))):
        patch_gguf(own, "p_rope:p=0.5", tmp_path / f"{name}.gguf")
        restore_gguf(tmp_path / f"{name}.gguf", tmp_path / f"{name}-back.gguf")
        assert (tmp_path / f"{name}-back.gguf").read_bytes() == own.read_bytes()


def test_a_table_that_export_put_onto_a_file_is_taken_off_again(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name)
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "folder", tokenizer=False)
    export_gguf(tmp_path / "folder", tmp_path / "out.gguf", base=base)
    restore_gguf(tmp_path / "out.gguf", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == base.read_bytes()


def test_a_file_without_what_was_there_before_gets_its_recorded_base_table(tmp_path, tokenizer):
    """One that was written from weights, or by an older version."""
    out = export_gguf(saved(tmp_path / "m", "yarn:factor=4"), tmp_path / "out.gguf", tokenizer=tokenizer)
    plain = export_gguf(saved(tmp_path / "plain"), tmp_path / "plain.gguf", tokenizer=tokenizer, name="m")
    restore_gguf(out, tmp_path / "back.gguf")
    assert tensors(tmp_path / "back.gguf") == tensors(plain) and keys(tmp_path / "back.gguf") == keys(plain)


def test_a_file_that_is_not_patched_has_nothing_to_restore(base, tmp_path):
    with pytest.raises(PatchError, match="carries no patch record: nothing to restore"):
        restore_gguf(base, tmp_path / "back.gguf")


def test_damage_to_what_was_there_before_is_named(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf")
    for text in ("no JSON", json.dumps({"keys": [[0, "AAAA"]], "tensors": []})):
        bad = rewritten(tmp_path / "out.gguf", tmp_path / "bad.gguf", [Key.of(BEFORE_KEY, text, "STRING")])
        with pytest.raises(PatchError, match="what its patch kept of the table before it is damaged"):
            restore_gguf(bad, tmp_path / "back.gguf")


# --- verify and inspect


def test_a_patched_file_is_verified(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", target_length=256)
    verified = rope_patch.verify(tmp_path / "out.gguf")
    assert verified.method == "yarn:factor=4" and "as recorded" in str(verified)
    assert verified.weights == open_gguf(base).weights and str(verified).endswith(f"; {verified.weights} weights")
    with pytest.raises(PatchError, match="carries no patch record: it is not patched"):
        rope_patch.verify(base)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (Key.of("llama.rope.freq_base", 2e4, "FLOAT32"), "its patch record says another table"),
        (Key.of("llama.rope.scaling.attn_factor", 1.2, "FLOAT32"), "its patch record says another table"),
        (Key.of("llama.context_length", 128, "UINT32"), "context_length is 128, the record says 256"),
        (Key.of("llama.context_length", 512, "UINT32"), "context_length is 512, the record says 256"),
        (Key.of(RECORD_KEY, "{}", "STRING"), "its patch record cannot be read"),
    ],
)
def test_a_changed_key_is_found(base, tmp_path, key, message):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", target_length=256)
    changed = rewritten(tmp_path / "out.gguf", tmp_path / "changed.gguf", [key])
    with pytest.raises(PatchError, match=message):
        rope_patch.verify(changed)


def test_a_changed_factor_is_found(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf")
    pieces = [
        Piece(p.name, p.shape, p.kind, lambda p=p: p.read() * 1.01) if "rope" in p.name else p
        for p in open_gguf(tmp_path / "out.gguf").pieces
    ]
    changed = rewritten(tmp_path / "out.gguf", tmp_path / "changed.gguf", pieces=pieces)
    with pytest.raises(PatchError, match="its patch record says another table: yarn:factor=4"):
        rope_patch.verify(changed)
    assert not rope_patch.inspect(changed).checked


def test_another_table_before_the_patch_is_found(base, tmp_path):
    other = rewritten(base, tmp_path / "other.gguf", [Key.of("llama.rope.freq_base", 2e4, "FLOAT32")])
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf")
    patch_gguf(other, "yarn:factor=4", tmp_path / "out2.gguf")
    kept = open_gguf(tmp_path / "out2.gguf").keys[BEFORE_KEY]
    with pytest.raises(PatchError, match="base table: the file keeps"):
        rope_patch.verify(rewritten(tmp_path / "out.gguf", tmp_path / "mixed.gguf", [kept]))


@pytest.mark.parametrize(("method", "kind"), [("yarn:factor=4", "yarn"), ("p_rope:p=0.5", "proportional")])
def test_inspect_says_that_the_table_is_the_recorded_one(base, tmp_path, method, kind):
    change = patch_gguf(base, method, tmp_path / "out.gguf")
    shown = str(rope_patch.inspect(tmp_path / "out.gguf"))
    assert "the table is equal to the recorded table within 1e-6" in shown
    assert f"GGUF: {kind}, " in shown and change.record.tables["all"].hash in shown and "Q4_1 weights" in shown


# --- models that came from a file


def test_a_model_of_transformers_own_reader_is_saved_as_a_plain_folder(base, tmp_path):
    """Which transformers itself refuses to save; another process, without this package, loads it."""
    model = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name).eval()
    rope_patch.apply(model, "yarn:factor=4")
    expected = logits(model, TOKENS)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "refused")
    rope_patch.save(model, tmp_path / "saved")
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), "hf_quantizer")
    assert torch.equal(stock_logits(tmp_path, TOKENS, "saved")["saved"], expected)


@byte_level_llama
def test_the_vocabulary_of_the_file_is_saved_beside_the_model(base, tmp_path, tokenizer):
    rope_patch.save(rope_patch.load(base, "yarn:factor=4"), tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("The pass key is 79132.").input_ids == tokenizer("The pass key is 79132.").input_ids


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file in .*gguf")  # PEFT: it assumes what is true
def test_an_adapter_that_was_trained_on_a_file_is_loaded_onto_it(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = rope_patch.load(base, "yarn:factor=4")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    trained = get_peft_model(model, config).eval()
    rope_patch.save(trained, tmp_path / "adapter")
    again = rope_patch.load(tmp_path / "adapter").eval()
    assert torch.equal(logits(again, TOKENS), logits(trained, TOKENS))


def test_two_tables_are_refused_for_a_file(base, tmp_path):
    with pytest.raises(ValueError, match="one table"):
        patch_gguf(base, "yarn:factor=4@64", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
