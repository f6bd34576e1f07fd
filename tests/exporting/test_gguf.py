"""GGUF files: tables read back, tensors copied byte for byte, what is refused, and nothing left behind after an error.

That llama.cpp computes the same with them is shown in test_engines.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import rewritten, saved, sentencepiece
from tiny import LLAMA3, YARN, ids, tiny_model
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast, StableLmConfig

import rope_patch
from rope_patch.methods import METHODS
from rope_patch.patching.locate import PatchError

gguf = pytest.importorskip("gguf")

from rope_patch.checkpoints.gguf_file import Key, Piece, open_gguf, write_gguf  # noqa: E402
from rope_patch.exporting.gguf import export_gguf, export_gguf_lora, read_gguf  # noqa: E402

BUNDLED = rope_patch.data_path("assets") / "llama"
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> Path:
    """A GGUF of the tiny Llama, plain."""
    folder = tmp_path_factory.mktemp("base")
    return export_gguf(saved(folder / "llama"), folder / "base.gguf", dtype="float32", tokenizer=tokenizer)


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


def table_of(path: Path):
    (slot,) = read_gguf(path).tables
    return slot


# --- tables


@pytest.mark.parametrize(
    ("method", "want"),
    # rope_theta 1e4, 8 pairs: 1e4 ** (-i / 8) over the frequency. PI by 4: 4 everywhere. p = 0.5 keeps 4 pairs of 8.
    [("pi:factor=4", [4.0] * 8), ("p_rope:p=0.5", [1.0] * 4 + [1e30] * 4), ("nope", [1e30] * 8)],
)
def test_the_tensor_holds_divisors(base, tmp_path, method, want):
    out = export_gguf(saved(tmp_path / "m", method), tmp_path / "m.gguf", base=base)
    (factors,) = (tensor for tensor in gguf.GGUFReader(out).tensors if tensor.name == "rope_freqs.weight")
    assert factors.tensor_type == F32
    assert factors.data.tolist() == pytest.approx(want, rel=2e-7)
    assert gguf.GGUFReader(out).get_field("llama.rope.freq_base").contents() == 10000.0


@pytest.mark.parametrize("method", METHODS)
def test_every_table_is_read_back(base, tmp_path, method):
    lists = {"longrope": ":factors=1/1/2/2/3/3/4/4", "table": ":values=1/0.5/0.2/0.1/0.05/0.02/0.01/0"}
    folder = saved(tmp_path / "m", f"{method}{lists.get(method, '')}")
    inspection = read_gguf(export_gguf(folder, tmp_path / "m.gguf", base=base))
    (slot,), (want,) = (
        inspection.tables,
        rope_patch.patching.verify.inspect_model(AutoModelForCausalLM.from_pretrained(folder)).tables,
    )
    torch.testing.assert_close(slot.inv_freq, want.inv_freq, rtol=3e-7, atol=0)
    assert slot.attention_scaling == pytest.approx(want.attention_scaling, rel=1e-7)
    assert slot.max_position_embeddings == 256
    assert inspection.record is not None and inspection.record.to_method().name == method and not inspection.warnings
    assert "GGUF" in str(inspection) and method in str(inspection)


def test_a_plain_table_needs_no_factors(base, tmp_path):
    out = export_gguf(saved(tmp_path / "m", "abf"), tmp_path / "m.gguf", base=base)
    assert "rope_freqs.weight" not in tensors(out)
    assert table_of(out).rope_theta == 500000 and table_of(out).rope_type == "default"


def test_attention_scaling_is_a_key(base, tmp_path):
    out = gguf.GGUFReader(export_gguf(saved(tmp_path / "m", "yarn:factor=4"), tmp_path / "m.gguf", base=base))
    assert out.get_field("llama.rope.scaling.attn_factor").contents() == pytest.approx(0.1 * np.log(4) + 1)  # YaRN
    assert out.get_field("llama.rope.scaling.type").contents() == "none"
    plain = gguf.GGUFReader(export_gguf(saved(tmp_path / "p", "pi:factor=4"), tmp_path / "p.gguf", base=base))
    assert plain.get_field("llama.rope.scaling.attn_factor") is None


def test_scaling_of_the_base_does_not_come_on_top(tmp_path, tokenizer, base):
    """The keys of a base that the engine would apply besides our factors, in every form that it reads."""
    linear = [Key.of("llama.rope.scale_linear", 2.0, "FLOAT32"), Key.of("llama.rope.scaling.factor", 2.0, "FLOAT32")]
    scaled = rewritten(base, tmp_path / "linear.gguf", linear, drop=["llama.rope.scaling.type"])
    own = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    out = export_gguf(saved(tmp_path / "m", "p_rope:p=0.5", rope_parameters=own), tmp_path / "m.gguf", base=scaled)
    # 1e4 ** (-i / 8) / 2 for the four pairs that turn
    assert table_of(out).inv_freq.tolist() == pytest.approx([0.5, 0.158114, 0.05, 0.0158114] + [0] * 4, rel=1e-5)
    assert not [name for name in gguf.GGUFReader(out).fields if name.endswith(("scaling.factor", "scale_linear"))]


@pytest.mark.parametrize("encoded", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_a_base_with_a_scaled_table_of_its_own(tmp_path, tokenizer, base, encoded):
    """The engine's own YaRN is read as transformers builds it; Llama 3.1's factors give place to the new table."""
    source = saved(tmp_path / "base", rope_parameters=encoded)
    if encoded is YARN:
        keys = {"type": ("yarn", "STRING"), "factor": (4.0, "FLOAT32"), "original_context_length": (64, "UINT32")}
        with_it = [Key.of(f"llama.rope.scaling.{name}", *value) for name, value in keys.items()]
        own = rewritten(base, tmp_path / "base.gguf", with_it)
    else:
        own = export_gguf(source, tmp_path / "base.gguf", dtype="float32", tokenizer=tokenizer)
        assert "rope_freqs.weight" in tensors(own)
    stock = AutoModelForCausalLM.from_pretrained(source).model.rotary_emb
    torch.testing.assert_close(table_of(own).inv_freq, stock.inv_freq, rtol=3e-7, atol=0)
    assert table_of(own).attention_scaling == pytest.approx(stock.attention_scaling)
    model = AutoModelForCausalLM.from_pretrained(source)
    patch = rope_patch.apply(model, "p_rope:p=0.5")
    out = export_gguf(model, tmp_path / "out.gguf", base=own)
    torch.testing.assert_close(table_of(out).inv_freq, patch.after[None].inv_freq, rtol=3e-7, atol=0)
    assert [name for name in tensors(out) if "rope" in name] == ["rope_freqs.weight"]


def test_what_cannot_be_read_as_one_table(base, tmp_path):
    two = [*open_gguf(base).pieces]
    for name, factor in (("rope_factors_long.weight", 2.0), ("rope_factors_short.weight", 1.0)):
        two.append(Piece(name, (8,), F32, lambda factor=factor: np.full(8, factor, np.float32)))
    with pytest.raises(ValueError, match="two tables"):
        read_gguf(rewritten(base, tmp_path / "two.gguf", pieces=two))
    with pytest.raises(ValueError, match="8 rotary factors for 4 pairs"):
        keys = [Key.of("llama.rope.dimension_count", 8, "UINT32")]
        read_gguf(rewritten(base, tmp_path / "few.gguf", keys, pieces=[*two[:-2], two[-1]]))
    with pytest.raises(ValueError, match="how many features rotate"):
        drop = ["llama.rope.dimension_count", "llama.attention", "llama.embedding"]
        read_gguf(rewritten(base, tmp_path / "none.gguf", drop=drop))
    with pytest.raises(ValueError, match="no model"):
        read_gguf(rewritten(base, tmp_path / "lora.gguf", [Key.of("general.type", "adapter", "STRING")]))


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gpt2", {}, "of 'gpt2', which has no rotary embeddings"),
        ("falcon-h1", {"attention.head_count": 0}, "does not say how many features rotate"),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "states no context"),
        ("llama", {"rope.scaling.type": "dynamic"}, "is 'dynamic', and llama.cpp knows none, linear, yarn, longrope"),
    ],
)
def test_files_of_others_without_a_table(tmp_path, architecture, keys, message):
    kinds = {int: "UINT32", float: "FLOAT32", str: "STRING"}
    numbers = {"embedding_length": 64, "attention.head_count": 4, **keys}
    entries = [Key.of(f"{architecture}.{name}", value, kinds[type(value)]) for name, value in numbers.items()]
    path = write_gguf(tmp_path / "m.gguf", [Key.of("general.architecture", architecture, "STRING"), *entries], [])
    with pytest.raises(ValueError, match=message):
        read_gguf(path)


def test_a_table_changed_after_us_is_remarked(base, tmp_path):
    out = export_gguf(saved(tmp_path / "m", "pi:factor=4"), tmp_path / "m.gguf", base=base)
    changed = rewritten(out, tmp_path / "c.gguf", [Key.of("llama.rope.freq_base", 20000.0, "FLOAT32")])
    assert "says another table: pi:factor=4" in read_gguf(changed).warnings[0]


# --- onto a base


@pytest.mark.parametrize("quantized", [False, True])
def test_tensors_are_copied_byte_for_byte(base, tmp_path, quantized):
    if quantized:
        reader = open_gguf(base)
        pieces = [
            Piece(p.name, p.shape, Q8_0, lambda p=p: gguf.quants.quantize(p.read(), Q8_0)) if len(p.shape) > 1 else p
            for p in reader.pieces
        ]
        base = rewritten(base, tmp_path / "q8.gguf", pieces=pieces)
    before = base.read_bytes()
    out = export_gguf(saved(tmp_path / "m", "yarn:factor=4"), tmp_path / "m.gguf", base=base)
    copied = tensors(out)
    assert copied.pop("rope_freqs.weight")[0] == "F32"
    assert copied == tensors(base)
    assert ("Q8_0" in {kind for kind, _ in copied.values()}) is quantized
    assert base.read_bytes() == before
    names = set(gguf.GGUFReader(base).fields) - {"llama.rope.freq_base", "llama.context_length", "GGUF.kv_count"}
    written, given = open_gguf(out), open_gguf(base)
    for name in names - {"GGUF.tensor_count", "llama.rope.scaling.type"}:
        assert written.value(name) == given.value(name), name


def test_a_base_of_another_alignment(base, tmp_path):
    reader = open_gguf(base)
    keys = [*reader.keys.values(), Key.of("general.alignment", 256, "UINT32")]
    wide = write_gguf(tmp_path / "wide.gguf", keys, list(reader.pieces), alignment=256)
    out = export_gguf(saved(tmp_path / "m", "pi:factor=4"), tmp_path / "m.gguf", base=wide)
    assert {name: data for name, data in tensors(out).items() if "rope" not in name} == tensors(base)


def test_a_config_alone_is_enough(base, tmp_path):
    folder = saved(tmp_path / "m", "pi:factor=4")
    whole = export_gguf(folder, tmp_path / "whole.gguf", base=base)
    (folder / "model.safetensors").unlink()
    assert export_gguf(folder, tmp_path / "alone.gguf", base=base).read_bytes() == whole.read_bytes()


def without(name):
    return lambda path, out: rewritten(path, out, drop=[name])


def with_key(name, value, kind="UINT32"):
    return lambda path, out: rewritten(path, out, [Key.of(name, value, kind)])


def cut(path, out, at=0.5):
    out.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])
    return out


def other_weights(path, out):
    pieces = [*open_gguf(path).pieces]
    pieces = [Piece(p.name, p.shape, p.kind, lambda p=p: p.read() * np.float32(1.02)) for p in pieces]
    return rewritten(path, out, pieces=pieces)


def tuned_and_quantized(path, out):
    """Norms as they were, matrices 5 % away, in Q8_0."""
    pieces = [
        Piece(p.name, p.shape, Q8_0, lambda p=p: gguf.quants.quantize(p.read() * np.float32(1.05), Q8_0))
        if len(p.shape) > 1
        else p
        for p in open_gguf(path).pieces
    ]
    return rewritten(path, out, pieces=pieces)


def more_rows(path, out):
    longer = Piece("token_embd.weight", (1056, 64), F32, lambda: np.zeros((1056, 64), np.float32))
    return rewritten(path, out, pieces=[longer, *(p for p in open_gguf(path).pieces if "embd" not in p.name)])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path, out: out.write_bytes(b"PK") and out, "is not a GGUF file"),
        (lambda path, out: cut(path, out, 0.001), "truncated or damaged"),
        (lambda path, out: cut(path, out, 0.02), "truncated or damaged"),
        (lambda path, out: cut(path, out, 0.9), "truncated or damaged"),
        (with_key("split.count", 3, "UINT16"), "one part of a split model"),
        (with_key("general.architecture", "qwen3", "STRING"), "is a GGUF of 'qwen3'"),
        (with_key("general.type", "adapter", "STRING"), "no model"),
        (with_key("llama.block_count", 3), "its block_count is 3, here it is 2"),
        (with_key("llama.embedding_length", 32), "embedding_length"),
        (with_key("llama.feed_forward_length", 32), "feed_forward_length"),
        (with_key("llama.attention.head_count", 8), "head_count is 8"),
        (with_key("llama.attention.head_count_kv", 1), "head_count_kv"),
        (with_key("llama.rope.dimension_count", 8), "dimension_count"),
        (with_key("llama.rope.freq_base", 5e5, "FLOAT32"), "another table"),
        (with_key("llama.rope.scaling.attn_factor", 1.1, "FLOAT32"), "another table"),
        (more_rows, "its vocabulary is 1056, here it is 1024"),
        (lambda path, out: rewritten(path, out, pieces=[]), "holds no weights"),
        (other_weights, "of other weights"),
        (tuned_and_quantized, "of other weights"),
    ],
)
def test_a_wrong_base_is_refused(base, tmp_path, spoil, message):
    wrong = spoil(base, tmp_path / "wrong.gguf")
    folder = saved(tmp_path / "m", "pi:factor=4")
    with pytest.raises(ValueError, match=re.escape(message)):
        export_gguf(folder, tmp_path / "out.gguf", base=wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "wrong.gguf"]


def test_a_base_that_carries_factors_is_refused(base, tmp_path):
    patched = export_gguf(saved(tmp_path / "yarn", "yarn:factor=4"), tmp_path / "yarn.gguf", base=base)
    folder = saved(tmp_path / "m", "pi:factor=4")
    with pytest.raises(PatchError, match=r"patched already, with yarn:factor=4"):
        export_gguf(folder, tmp_path / "out.gguf", base=patched)
    with pytest.raises(PatchError, match="carries factors of its own"):
        export_gguf(folder, tmp_path / "out.gguf", base=rewritten(patched, tmp_path / "n.gguf", drop=["rope_patch."]))


# --- other families


def shell(model, architecture: str, out: Path, **keys) -> Path:
    """A GGUF with the shapes of a model and its embedding: enough to patch, not to run."""
    config = model.config
    numbers = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "context_length": 64, **keys}
    return write_gguf(
        out,
        [
            Key.of("general.architecture", architecture, "STRING"),
            *(Key.of(f"{architecture}.{name}", value, "UINT32") for name, value in numbers.items()),
        ],
        [
            Piece("token_embd.weight", (config.vocab_size, 64), F32, lambda: np.zeros((config.vocab_size, 64), "f4")),
            Piece("rope_freqs.weight", (16,), F32, lambda: np.ones(16, "f4")),
        ][: 2 if architecture == "gemma4" else 1],
    )


def test_phi3_has_two_tensors_that_agree(tmp_path):
    model = tiny_model("phi3")
    rope_patch.apply(model, "yarn:factor=4")
    own = shell(model, "phi3", tmp_path / "base.gguf")
    out = export_gguf(model, tmp_path / "out.gguf", base=own)
    long, short = (tensors(out)[f"rope_factors_{name}.weight"] for name in ("long", "short"))
    assert long == short
    torch.testing.assert_close(table_of(out).inv_freq, model.model.rotary_emb.inv_freq, rtol=3e-7, atol=0)
    with pytest.raises(ValueError, match="only Llama and Mistral are written, not phi3"):
        export_gguf(model, tmp_path / "own.gguf")


def test_gemma4_takes_a_table_for_its_full_layers(tmp_path):
    def patched(method, **options):
        model = tiny_model("gemma4")
        rope_patch.apply(model, method, **options)
        return model

    model = patched("pi:factor=4")
    own = shell(model, "gemma4", tmp_path / "base.gguf", **{"rope.dimension_count": 32, "rope.freq_base": 1000000})
    own = rewritten(own, own, [Key.of("gemma4.rope.freq_base", 1e6, "FLOAT32")])
    proportional = Piece("rope_freqs.weight", (16,), F32, lambda: np.repeat(np.float32([1, 1e30]), [4, 12]))
    rest = [p for p in open_gguf(own).pieces if p.name != "rope_freqs.weight"]
    own = rewritten(own, tmp_path / "real.gguf", pieces=[proportional, *rest])
    full = model.model.rotary_emb.full_attention_inv_freq
    out = export_gguf(model, tmp_path / "out.gguf", base=own)
    torch.testing.assert_close(table_of(out).inv_freq, full, rtol=3e-7, atol=0)
    plain = export_gguf(patched("abf", replace_scaling=True), tmp_path / "abf.gguf", base=own)
    assert "rope_freqs.weight" in tensors(plain)  # its graph does not load without
    with pytest.raises(ValueError, match="would scale the sliding ones too"):
        export_gguf(patched("table", attention_scaling=1.2), tmp_path / "no.gguf", base=own)
    both = ("full_attention", "sliding_attention")
    with pytest.raises(ValueError, match="sliding_attention is patched too"):
        export_gguf(patched("pi:factor=4", layer_types=both), tmp_path / "no.gguf", base=own)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
def test_graphs_without_factors_are_refused(tmp_path, base, family):
    model = tiny_model(family)
    rope_patch.apply(model, "pi:factor=4")
    with pytest.raises(ValueError, match=rf"graph for {family}\w* reads no rotary factors \(seen at .*0\.3\.36\)"):
        export_gguf(model, tmp_path / "out.gguf", base=base)


def test_an_unknown_family_is_refused(tmp_path, base):
    config = StableLmConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="does not know 'stablelm'"):
        export_gguf(model, tmp_path / "out.gguf", base=base)


def test_a_window_is_warned_of(tmp_path, tokenizer):
    model = tiny_model("mistral", vocab_size=1024)
    with pytest.warns(UserWarning, match="last 32 tokens"):
        export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer)


# --- without a base


def test_rows_of_queries_and_keys_become_neighbours(tmp_path, tokenizer):
    """In a head of 16, ggml pairs 2 i with 2 i + 1 where transformers pairs i with i + 8."""
    model = tiny_model("llama", vocab_size=1024, attention_bias=True)
    torch.nn.init.normal_(model.model.layers[0].self_attn.k_proj.bias)
    path = export_gguf(model, tmp_path / "m.gguf", dtype="float32", tokenizer=tokenizer)
    written = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}
    order = [head * 16 + half * 8 + i for head in range(4) for i in range(8) for half in range(2)]
    attention = model.model.layers[0].self_attn
    assert np.array_equal(written["blk.0.attn_q.weight"], attention.q_proj.weight.detach()[order])
    assert np.array_equal(written["blk.0.attn_k.weight"], attention.k_proj.weight.detach()[order[:32]])
    assert np.array_equal(written["blk.0.attn_k.bias"], attention.k_proj.bias.detach()[order[:32]])
    assert np.array_equal(written["blk.0.attn_v.weight"], attention.v_proj.weight.detach())


@pytest.mark.parametrize("tied", [True, False])
def test_memory_one_file_and_shards_give_the_same_file(tmp_path, tokenizer, tied):
    model = tiny_model("llama", vocab_size=1024, tie_word_embeddings=tied)
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "one", tokenizer=tokenizer)
    rope_patch.save(model, tmp_path / "many", tokenizer=tokenizer, max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    paths = [export_gguf(tmp_path / name, tmp_path / f"{name}.gguf") for name in ("one", "many")]
    paths.append(export_gguf(model, tmp_path / "memory.gguf", tokenizer=tokenizer))
    assert tensors(paths[0]) == tensors(paths[1]) == tensors(paths[2])
    assert ("output.weight" in tensors(paths[0])) is not tied
    assert {kind for kind, _ in tensors(paths[0]).values()} == {"F16", "F32"}
    (tmp_path / "many" / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    next((tmp_path / "many").glob("*-00002-*")).unlink(missing_ok=True)
    with pytest.raises(OSError, match="lacks"):
        export_gguf(tmp_path / "many", tmp_path / "lost.gguf")


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_weights_back(tmp_path, tokenizer, tied):
    model = tiny_model("llama", vocab_size=1024, tie_word_embeddings=tied)
    export_gguf(model, tmp_path / "m.gguf", dtype="float32", tokenizer=tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert again.config.rope_parameters["rope_theta"] == 10000 and again.config.max_position_embeddings == 64
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_dtypes(tmp_path, tokenizer):
    model = tiny_model("llama", vocab_size=1024)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"up_proj\.weight holds numbers too large for float16"):
        export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())
    path = export_gguf(model, tmp_path / "m.gguf", dtype="bfloat16", tokenizer=tokenizer)
    (up,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    want = model.model.layers[0].mlp.up_proj.weight.detach().bfloat16().float()
    assert np.array_equal(gguf.quants.dequantize(up.data, up.tensor_type), want)


def test_a_byte_level_vocabulary(base, tokenizer):
    reader = open_gguf(base)
    assert reader.value("tokenizer.ggml.model") == "gpt2"
    assert reader.value("tokenizer.ggml.pre") == "smollm"  # digits one by one
    listed = reader.value("tokenizer.ggml.tokens")
    assert listed == tokenizer.convert_ids_to_tokens(range(1024))
    assert reader.value("tokenizer.ggml.token_type")[:4] == [3, 3, 3, 1]  # control, and a normal one
    assert reader.value("tokenizer.ggml.add_bos_token") == (tokenizer("a").input_ids[0] == tokenizer.bos_token_id)


def test_a_sentencepiece_vocabulary(tmp_path):
    path = export_gguf(tiny_model("llama", vocab_size=270), tmp_path / "m.gguf", tokenizer=sentencepiece())
    reader = open_gguf(path)
    assert reader.value("tokenizer.ggml.model") == "llama"
    assert reader.value("tokenizer.ggml.scores")[260:264] == [-2.0, -2.0, 0.0, -1.0]  # a, b; ab merges first
    assert reader.value("tokenizer.ggml.tokens")[262:] == ["ab", "▁ab", *(f"[PAD{i}]" for i in range(264, 270))]
    types = reader.value("tokenizer.ggml.token_type")
    assert types[:4] == [2, 3, 3, 6] and types[263:] == [1] + [5] * 6  # unknown, control, byte … normal, unused
    assert reader.value("tokenizer.ggml.add_space_prefix") is True
    assert reader.value("tokenizer.chat_template") == "{{ messages }}"


def test_vocabularies_it_cannot_write(tmp_path, tokenizer):
    def refused(message, tokenizer, vocab_size=1024):
        with pytest.raises(ValueError, match=message):
            export_gguf(tiny_model("llama", vocab_size=vocab_size), tmp_path / "m.gguf", tokenizer=tokenizer)

    refused("tokens up to 1023, and the model 512 rows", tokenizer, 512)
    refused("llama.cpp may write text otherwise", sentencepiece(normalizers.Lowercase()))
    refused("knows no WordLevel", PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))))
    refused("splits? text otherwise", PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))))
    refused("give tokenizer=", None)
    refused("has no tokenizer that can be loaded", tmp_path)
    assert not list(tmp_path.iterdir())


# --- what comes in, what is left behind


def test_arguments(tmp_path, base, tokenizer):
    folder = saved(tmp_path / "m", "pi:factor=4")
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got 'int8'"):
        export_gguf(folder, tmp_path / "o.gguf", dtype="int8")
    with pytest.raises(ValueError, match=r"must be a file \*\.gguf"):
        export_gguf(folder, tmp_path / "o.bin", base=base)
    with pytest.raises(FileNotFoundError, match="no folder"):
        export_gguf(folder, tmp_path / "nowhere" / "o.gguf", base=base)
    with pytest.raises(FileExistsError, match="allow overwriting"):
        export_gguf(folder, base, base=base)
    with pytest.raises(ValueError, match="is the base itself"):
        export_gguf(folder, base, base=base, overwrite=True)
    with pytest.raises(FileNotFoundError, match="no file"):
        export_gguf(folder, tmp_path / "o.gguf", base=tmp_path / "b.gguf")
    with pytest.raises(ValueError, match="on the meta device"):
        export_gguf(rope_patch.checkpoints.offline.skeleton(folder), tmp_path / "o.gguf", tokenizer=tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="the checkpoint is quantized"):
        export_gguf(folder, tmp_path / "o.gguf", tokenizer=tokenizer)
    config["rope_patch"]["tables"]["all"]["inv_freq"][0] = 0.9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PatchError, match="altered"):
        export_gguf(folder, tmp_path / "o.gguf", base=base)
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="dynamic table"):
        export_gguf(dynamic, tmp_path / "o.gguf", base=base)
    with pytest.raises(ValueError, match="reads no rotary factors"):
        export_gguf(tiny_model("gemma3"), tmp_path / "o.gguf", base=base)


def test_without_the_package_the_error_says_how(tmp_path, monkeypatch):
    folder = saved(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'rope_patch[gguf]'")):
        export_gguf(folder, tmp_path / "m.gguf")


def test_a_full_disk(base, tmp_path, monkeypatch):
    folder, out = saved(tmp_path / "m", "pi:factor=4"), tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="needs 1 MiB"):
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        export_gguf(folder, out, base=base, overwrite=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (base.stat().st_size // 2, hard))  # a disk that fills up on the way
        with pytest.raises(OSError):
            export_gguf(folder, out, base=base, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out.gguf"]
    export_gguf(folder, out, base=base, overwrite=True)
    assert table_of(out).inv_freq[0] == 0.25


class Mallinfo(ctypes.Structure):
    """What glibc tells of its heap: the fifth number is of large blocks, the eighth of all others in use [bytes]."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc what is allocated")
@pytest.mark.parametrize("onto_base", [True, False])
def test_one_tensor_at_a_time(tmp_path, tokenizer, onto_base):
    folder = saved(tmp_path / "m", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, head_dim=128)
    own = export_gguf(folder, tmp_path / "base.gguf", dtype="float32", tokenizer=tokenizer) if onto_base else None
    mallinfo, held = ctypes.CDLL(None).mallinfo2, []
    mallinfo.restype = Mallinfo

    def measure(_: str) -> None:
        numbers = mallinfo().numbers
        held.append((numbers[4] + numbers[7]) >> 20)

    gc.collect()
    measure("before anything is read")
    out = export_gguf(
        folder, tmp_path / "out.gguf", base=own, dtype="float32", tokenizer=tokenizer, on_progress=measure
    )
    assert out.stat().st_size > 50 * 2**20
    assert max(held) - held[0] < 20  # MiB; a tensor has 4, and is copied a few times


# --- adapters


def adapter(folder: Path, method: str | None = "yarn:factor=4", **options) -> Path:
    from peft import LoraConfig, get_peft_model

    base = saved(folder / "base")
    model = LlamaForCausalLM.from_pretrained(base)
    if method:
        rope_patch.apply(model, method)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    if method:
        rope_patch.save(peft_model, folder / "adapter")
    else:
        peft_model.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter(tmp_path):
    from safetensors.torch import load_file

    folder = adapter(tmp_path, use_rslora=True)
    out = open_gguf(export_gguf_lora(folder, tmp_path / "a.gguf"))
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    assert {name: out.value(name) for name in keys} == keys
    assert '"method": "yarn"' in out.value("rope_patch.patching.record")
    written, stored = (
        {piece.name: np.array(piece.read()) for piece in out.pieces},
        load_file(folder / "adapter_model.safetensors"),
    )
    assert len(written) == len(stored) == 8
    own = "base_model.model.model.layers.1.self_attn.{}.lora_{}.weight".format
    order = [head * 16 + half * 8 + i for head in range(4) for i in range(8) for half in range(2)]
    assert np.array_equal(written["blk.1.attn_q.weight.lora_a"], stored[own("q_proj", "A")])
    # rank-stabilised: 8 / sqrt(4) where the engine takes 8 / 4
    assert np.array_equal(written["blk.1.attn_q.weight.lora_b"], 2 * stored[own("q_proj", "B")][order])
    assert np.array_equal(written["blk.1.attn_v.weight.lora_b"], 2 * stored[own("v_proj", "B")])
    with pytest.raises(ValueError, match=r"is an adapter: merge it .* export_gguf_lora"):
        export_gguf(folder, tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="holds no adapter"):
        export_gguf_lora(tmp_path / "base", tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="merge adapters"):
        export_gguf(rope_patch.load(folder), tmp_path / "m.gguf", tokenizer=None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["embed_tokens"]}, "trained ['embed_tokens'] whole, which llama.cpp drops"),
        ({"use_dora": True}, "is DoRA"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"init_lora_weights": "pissa"}, "changed the base's weights when it began (pissa)"),
        ({"target_modules": ["embed_tokens"]}, "no LoRA of a linear layer"),
        ({"trainable_token_indices": [1, 2]}, "trained single tokens"),
    ],
)
def test_adapters_it_cannot_write(tmp_path, options, message):
    folder = adapter(tmp_path, None, **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        export_gguf_lora(folder, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()
