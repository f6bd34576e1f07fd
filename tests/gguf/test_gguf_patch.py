"""A GGUF file is patched and verified as a file: only its table changes, and no weights are loaded.

What a file holds is read with gguf's own reader, and what it computes with transformers'.
"""

import struct
import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import gguf_of, quantized, rewritten, stated, write_toy
from support.patches import lora
from support.prompting import TOKENIZER
from support.subsets import byte_level_llama, full
from support.tiny import YARN, ids, logits, tiny_model
from transformers import AutoTokenizer

import rope_patch
from rope_patch import PatchError
from rope_patch.checkpoints.folder_patch import restore_folder
from rope_patch.gguf.patch import patch_gguf
from rope_patch.gguf.table import RECORD_KEY
from rope_patch.runtime.gguf_file import Key, Piece, open_gguf, write_gguf

TOKENS = ids(48) % 96


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A GGUF of the tiny Llama in Q4_1: context 64, base 1e4, heads of 16."""
    folder = tmp_path_factory.mktemp("base")
    plain = write_toy(tiny_model(vocab_size=1024), folder / "plain.gguf", TOKENIZER)
    return quantized(plain, folder / "base.gguf", "Q4_1")


@pytest.mark.parametrize("alignment", [32, 256])
def test_tensors_of_any_size_are_where_the_file_says(tmp_path, alignment):
    arrays = {f"of_{size}": np.arange(size, dtype=np.float32) for size in (1, 9, 64)}
    pieces = [Piece(n, a.shape, gguf.GGMLQuantizationType.F32, lambda a=a: a) for n, a in arrays.items()]
    stated = [Key.of("general.alignment", alignment)]
    path = write_gguf(gguf_of(stated, pieces, alignment), tmp_path / "any.gguf")
    assert tensors(path) == {name: ("F32", array.tobytes()) for name, array in arrays.items()}


def tensors(path):
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


def keys(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in name}


# --- apply


@pytest.mark.parametrize("method", ["yarn:factor=4", "p_rope:p=0.5"])
def test_every_tensor_but_the_factors_is_the_same_bytes(base, tmp_path, method):
    patch_gguf(base, method, tmp_path / "out.gguf")
    written = tensors(tmp_path / "out.gguf")
    assert written.pop("rope_freqs.weight")[0] == "F32"
    assert written == tensors(base) and "Q4_1" in {kind for kind, _ in written.values()}


def test_every_key_but_those_of_the_table_is_kept_in_its_place(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", target_length=256)
    before = keys(base)
    after = keys(tmp_path / "out.gguf")
    assert {name for name in after if after[name] != before.get(name)} == {
        "llama.context_length",
        "llama.rope.scaling.type",
        "llama.rope.scaling.attn_factor",
        RECORD_KEY,
    }
    assert after["llama.context_length"] == 256
    assert [name for name in after if name in before] == list(before)


SCALED = ("rope.freq_base", "rope.scaling.", "context_length")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe", "gemma3"])
@pytest.mark.parametrize("method", ["yarn:factor=4", "pi:factor=4", "abf:rope_theta=50000"])
def test_graphs_without_factors_get_the_keys_of_llama_cpps_converter(tmp_path, architecture, method):
    """Those that its conversion/base.py writes of a config with the same table, through the same writer."""
    own = stated(tmp_path / "own.gguf", architecture, **{"attention.sliding_window": 16})
    patch_gguf(own, method, tmp_path / "out.gguf")
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", architecture)
    writer.add_rope_freq_base(50000.0 if method.startswith("abf") else 10000.0)
    writer.add_context_length(64 if method.startswith("abf") else 256)
    if not method.startswith("abf"):
        kinds = gguf.RopeScalingType
        writer.add_rope_scaling_type(kinds.LINEAR if method.startswith("pi") else kinds.YARN)
        writer.add_rope_scaling_factor(4.0)
    if method.startswith("yarn"):
        writer.add_rope_scaling_orig_ctx_len(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    def scaled(path):
        found = {name.removeprefix(f"{architecture}."): value for name, value in keys(path).items()}
        return {name: value for name, value in found.items() if name.startswith(SCALED)}

    plain = {"rope.scaling.type": "none"} if method.startswith("abf") else {}  # it keeps --rope-freq-scale out
    assert scaled(tmp_path / "out.gguf") == scaled(tmp_path / "theirs.gguf") | plain
    assert rope_patch.verify(tmp_path / "out.gguf").method.startswith(method)
    assert not tensors(tmp_path / "out.gguf")


def test_an_attention_factor_of_ones_own_is_what_is_left_of_the_engines(tmp_path):
    """llama.cpp multiplies rope.scaling.attn_factor by its own 0.1 ln(4) + 1 = 1.13863."""
    patch_gguf(stated(tmp_path / "m.gguf", "qwen3"), "yarn:factor=4:attention_factor=1.5", tmp_path / "out.gguf")
    assert keys(tmp_path / "out.gguf")["qwen3.rope.scaling.attn_factor"] == pytest.approx(1.5 / 1.138629, rel=1e-6)
    assert rope_patch.inspect(tmp_path / "out.gguf").tables[0].attention_scaling == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("architecture", "method", "message"),
    [
        ("qwen3", "p_rope:p=0.5", "qwen3 reads no rotary factors"),
        ("qwen3", "yarn:factor=4:beta_slow=0.1", "beta_slow"),
        ("gemma3", "yarn:factor=4:attention_factor=1.5", "would scale the sliding ones too"),
        ("gemma4", "abf", "patch the checkpoint and write a file of it"),
        ("deepseek2", "abf", "'deepseek2' was never checked"),
    ],
)
def test_tables_that_no_file_holds(tmp_path, architecture, method, message):
    own = stated(tmp_path / "m.gguf", architecture, **{"attention.sliding_window": 16})
    with pytest.raises(ValueError, match=message):
        patch_gguf(own, method, tmp_path / "out.gguf")


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def scaled_by_keys(model, path):
    """A file of a model whose YaRN or linear scaling is left to llama.cpp."""
    scaling = model.config.rope_parameters
    keys = {"rope__scaling__type": scaling["rope_type"], "rope__scaling__factor": scaling["factor"]}
    if scaling["rope_type"] == "yarn":
        keys["rope__scaling__original_context_length"] = scaling["original_max_position_embeddings"]
    return write_toy(model, path, **keys)


@pytest.mark.parametrize(
    ("family", "scaling", "context", "method"),
    [
        ("llama", YARN, 64, "yarn"),
        full("llama", YARN, 256, "yarn"),
        full("llama", YARN, 64, "ntk"),
        ("llama", YARN, 64, "abf:factor=4"),
        full("llama", LINEAR, 256, "abf:factor=4"),
        ("qwen2", YARN, 64, "yarn"),
        ("qwen2", LINEAR, 256, "pi"),
    ],
)
def test_scaling_in_the_keys_of_a_file_is_raised_as_that_of_a_folder(tmp_path, family, scaling, context, method):
    """Also where a card's YaRN left the stated context at 64: it reaches 256."""
    model = tiny_model(family, vocab_size=1024, max_position_embeddings=context, rope_parameters=dict(scaling))
    file = scaled_by_keys(model, tmp_path / "m.gguf")
    change = patch_gguf(file, method, tmp_path / "out.gguf", target_length=512)
    patch = rope_patch.apply(model, method, target_length=512)
    assert change.method == patch.method
    assert torch.equal(change.after[None].inv_freq, patch.after[None].inv_freq)
    assert rope_patch.verify(tmp_path / "out.gguf").record.tables == patch.record.tables
    assert rope_patch.doctor(tmp_path / "out.gguf").ok
    for loaded in (rope_patch.load(tmp_path / "out.gguf"), rope_patch.load(file, method, target_length=512)):
        assert loaded.config.rope_parameters.items() >= model.config.rope_parameters.items()
        assert torch.equal(rope_patch.inspect(loaded).tables[0].inv_freq, patch.after[None].inv_freq)


def test_an_attention_factor_of_a_files_yarn_is_kept_when_it_is_raised(tmp_path):
    """llama.cpp multiplies 0.1 ln(4) + 1 = 1.138629 by attn_factor, and that is a setting."""
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}
    change = patch_gguf(stated(tmp_path / "m.gguf", "qwen2", **keys), "yarn", tmp_path / "out.gguf", target_length=512)
    assert change.after[None].attention_scaling == pytest.approx(1.5 * 1.138629)
    assert rope_patch.inspect(tmp_path / "out.gguf").tables[0].attention_scaling == pytest.approx(1.5 * 1.138629)


def test_a_patched_file_is_not_patched_again(base, tmp_path):
    patch_gguf(base, "yarn:factor=4", tmp_path / "yarn.gguf")
    with pytest.raises(PatchError, match="yarn:factor=4"):
        patch_gguf(tmp_path / "yarn.gguf", "pi:factor=2", tmp_path / "pi.gguf")
    with pytest.raises(ValueError, match="GGUF file"):
        restore_folder(tmp_path / "yarn.gguf", tmp_path / "back")


@pytest.mark.parametrize("option", [{"layer_types": ["full_attention"]}, {"freeze_at": 64}, {"replace": True}])
def test_options_that_a_file_has_no_use_for(base, tmp_path, option):
    with pytest.raises(ValueError, match="patched"):
        patch_gguf(base, "yarn:factor=4", tmp_path / "out.gguf", **option)


# --- what comes in, what is left behind


def test_places_it_does_not_write_to(base, tmp_path):
    """tests/cli/test_gguf_models.py has others."""
    own = tmp_path / "own.gguf"
    own.write_bytes(base.read_bytes())
    with pytest.raises(FileNotFoundError):
        patch_gguf(tmp_path / "missing.gguf", "nope", tmp_path / "out.gguf")
    with pytest.raises(ValueError, match="itself"):
        patch_gguf(own, "nope", own, overwrite=True)
    assert own.read_bytes() == base.read_bytes() and [path.name for path in tmp_path.iterdir()] == ["own.gguf"]


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.95])
def test_a_truncated_file_is_refused(base, tmp_path, share):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(base.read_bytes()[: int(share * base.stat().st_size)])
    with pytest.raises(ValueError, match="truncated"):
        patch_gguf(cut, "nope", tmp_path / "out.gguf")


def test_arrays_that_are_nested_thousands_deep_are_refused_by_name(base, tmp_path):
    raw = struct.pack("<Q4sI", 4, b"deep", 9) + 5000 * struct.pack("<IQ", 9, 1) + struct.pack("<IQI", 4, 1, 7)
    rewritten(base, tmp_path / "deep.gguf", [Key("deep", raw, lambda: None)])
    with pytest.raises(ValueError, match=r"deep\.gguf"):
        patch_gguf(tmp_path / "deep.gguf", "nope", tmp_path / "out.gguf")


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    shape = (1024, 1024)
    kind = gguf.GGMLQuantizationType.F32  # 4 MiB
    pieces = [Piece(f"blk.{i}", shape, kind, lambda: np.zeros(shape, np.float32)) for i in range(12)]
    keys = list(open_gguf(stated(tmp_path / "m.gguf", "llama")).keys.values())
    own = write_gguf(gguf_of(keys, pieces), tmp_path / "own.gguf")
    tracemalloc.start()
    patch_gguf(own, "pi:factor=4", tmp_path / "out.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "out.gguf").stat().st_size > 48 * 2**20 > 3 * peak


def test_an_interrupt_leaves_nothing(base, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    pieces = [*open_gguf(base).pieces, Piece("last", (1,), gguf.GGMLQuantizationType.F32, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        write_gguf(replace(open_gguf(base), pieces=tuple(pieces)), tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


def test_keys_that_ggufs_own_writer_refuses_are_kept(base, tmp_path):
    """An array of arrays: the name, the type 9, arrays of 2 numbers of the type 3."""
    name = "some.nested"
    parts = [struct.pack("<IQ2h", 3, 2, i, i + 1) for i in (1, 5)]
    raw = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IIQ", 9, 9, 2) + b"".join(parts)
    nested = Key(name, raw, lambda: None)
    patch_gguf(rewritten(base, tmp_path / "own.gguf", [nested]), "yarn:factor=4", tmp_path / "out.gguf")
    assert raw in (tmp_path / "out.gguf").read_bytes()


def test_a_header_is_read_as_ggufs_own_reader_reads_it(base):
    opened = open_gguf(base)
    reference = gguf.GGUFReader(base)
    assert {name: opened.value(name) for name in opened.keys} == keys(base)
    read = {piece.name: (piece.kind, piece.read().shape, piece.read().tobytes()) for piece in opened.pieces}
    assert read == {t.name: (t.tensor_type, t.data.shape, t.data.tobytes()) for t in reference.tensors}
    assert opened.weights == "Q4_1"


# --- verify and inspect


def test_a_file_without_a_patch_is_not_verified(base):
    with pytest.raises(PatchError, match="record"):
        rope_patch.verify(base)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (Key.of("llama.rope.freq_base", 2e4), "another table"),
        (Key.of("llama.rope.scaling.attn_factor", 1.2), "another table"),
        (Key.of("llama.context_length", 512), "512"),
        (Key.of(RECORD_KEY, "{}"), "read"),
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
    with pytest.raises(PatchError, match="yarn:factor=4"):
        rope_patch.verify(changed)
    assert rope_patch.inspect(changed).warnings


# --- models that came from a file


@byte_level_llama
def test_the_vocabulary_of_the_file_is_saved_beside_the_model(base, tmp_path):
    rope_patch.save(rope_patch.load(base, "yarn:factor=4"), tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("The pass key is 79132.").input_ids == TOKENIZER("The pass key is 79132.").input_ids


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file in .*gguf")  # PEFT: it assumes what is true
def test_an_adapter_that_was_trained_on_a_file_is_loaded_onto_it(base, tmp_path):
    model = rope_patch.load(base, "yarn:factor=4")
    trained = lora(model)
    rope_patch.save(trained, tmp_path / "adapter")
    again = rope_patch.load(tmp_path / "adapter")
    assert torch.equal(logits(again, TOKENS), logits(trained, TOKENS))
