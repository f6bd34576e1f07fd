"""What we export, run in the engine itself: llama.cpp, through llama-cpp-python. `make test-engines` runs these.

transformers computes the wanted logits in float32. llama.cpp keeps keys and values in float16 unless told otherwise,
and that rounding is most of what differs: hence two bars, and a control that shows what another table would give.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fits import fitted
from gguf_files import sentencepiece
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.frequencies import table_of

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")

from rope_patch.checkpoints.gguf_file import Key, Piece, open_gguf, write_gguf  # noqa: E402
from rope_patch.exporting.flags import flags  # noqa: E402
from rope_patch.exporting.gguf import export_gguf, export_gguf_lora, read_gguf  # noqa: E402
from rope_patch.exporting.gguf_vocab import vocabulary_keys  # noqa: E402
from rope_patch.exporting.gguf_weights import pieces_from, weights_of  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ASSETS = rope_patch.data_path("assets")
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FOLDERS = {"llama": ASSETS / "llama", "stories260K": DATA / "checkpoints" / "stories260K"}
TEXT = (ASSETS / "domains" / "english.txt").read_text(encoding="utf-8")
TOKENS = 700
METHODS = ("default", "pi:factor=4", "abf", "yarn:factor=4", "p_rope:p=0.5", "truncated", "irregular", "fitted")


def loaded(name: str):
    if not FOLDERS[name].is_dir():
        pytest.skip(f"the checkpoint {name} is not beside the repository")
    return AutoModelForCausalLM.from_pretrained(FOLDERS[name], dtype=torch.float32).eval()


@functools.cache
def tokenizer_of(name: str):
    return AutoTokenizer.from_pretrained(FOLDERS[name], model_max_length=1 << 30)


@functools.cache
def tokens_of(name: str) -> list[int]:
    """English for the bundled Llama, random ids for the other.

    What the float16 cache costs depends on the ids, with a patch or without: the other way round, 0.1 to 0.4 was seen,
    where the float32 cache stays below 0.002.
    """
    if name == "llama":
        return tokenizer_of(name)(TEXT).input_ids[:TOKENS]
    return torch.randint(3, 512, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


def patched(name: str, method: str):
    """A model under a method; ``fitted`` is a table that was learned."""
    model = loaded(name)
    if method == "irregular":
        rope_patch.apply(model, irregular(model.model.rotary_emb.inv_freq, 1.07))
    elif method == "fitted":
        patch = fitted(model, tokenizer_of(name), target_length=512, init="pi:factor=2", steps=8, retrieval=0.0)
        assert patch.method.name == "table"  # a learned one, not what it began with
    else:
        rope_patch.apply(model, method, target_length=1024)
    return model


@torch.no_grad()
def expected_logits(model, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids])).logits[0].numpy()


def engine(path: Path, ids: list[int], *, float32_cache: bool = True, **options) -> np.ndarray:
    """Logits of every position, (tokens, vocabulary), as llama.cpp computes them."""
    if float32_cache:
        options |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    size = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 1024, "n_threads": 1, "n_threads_batch": 1}
    llama = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **(size | options))
    try:
        llama.eval(ids)
        return np.array(llama.scores[: len(ids)])
    finally:
        llama.close()


def agreement(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """The share of positions with one and the same best token, and the largest difference of a logit."""
    assert got.shape == want.shape
    return float((got.argmax(1) == want.argmax(1)).mean()), float(np.abs(got - want).max())


@pytest.mark.parametrize("method", ["yarn:factor=4", "pi:factor=4", "abf"])
def test_options_of_the_command_line_give_the_written_table(method, tmp_path):
    """What ``rope-patch flags`` prints, on a file of the unpatched model, against a file that holds the table."""
    plain, holds = (tmp_path / f"{name}.gguf" for name in ("plain", "patched"))
    rope_patch.export(FOLDERS["llama"], plain, to="gguf", dtype="float32")
    rope_patch.export(FOLDERS["llama"], holds, to="gguf", dtype="float32", method=method, target_length=1024)
    said = flags(plain, method, "llama.cpp", target_length=1024).settings
    kinds = {"none": 0, "linear": 1, "yarn": 2}  # enum llama_rope_scaling_type
    options = {"rope_freq_base": said["--rope-freq-base"], "rope_scaling_type": kinds[said["--rope-scaling"]]}
    options |= {"rope_freq_scale": 1 / said["--rope-scale"]} if "--rope-scale" in said else {}
    named = {"yarn_orig_ctx": int, "yarn_beta_fast": float, "yarn_beta_slow": float}
    flag_of = {name: f"--{name.replace('_', '-')}" for name in named}
    options |= {name: read(said[flag_of[name]]) for name, read in named.items() if flag_of[name] in said}
    written = engine(holds, tokens_of("llama"))
    assert np.abs(engine(plain, tokens_of("llama"), **options) - written).max() < 0.01
    assert np.abs(engine(plain, tokens_of("llama")) - written).max() > 1.0


def close(got: np.ndarray, want: np.ndarray, bar: float) -> None:
    same, off = agreement(got, want)
    print(f"argmax {same:.4f}, max difference {off:.2g}")
    assert same >= 0.99 and off <= bar


def far(got: np.ndarray, want: np.ndarray) -> None:
    same, off = agreement(got, want)
    print(f"control: argmax {same:.4f}, max difference {off:.2g}")
    assert same < 0.9 and off > 1


@pytest.fixture(scope="module", params=FOLDERS)
def plain(request, tmp_path_factory) -> tuple[str, Path]:
    """A checkpoint, and our GGUF of it before any patch."""
    out = tmp_path_factory.mktemp(request.param) / "base.gguf"
    return request.param, export_gguf(
        loaded(request.param), out, dtype="float32", tokenizer=tokenizer_of(request.param)
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("llama") / "base.gguf"
    return export_gguf(FOLDERS["llama"], out, dtype="float32")


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_computes_what_transformers_does(plain, tmp_path, method):
    name, base = plain
    model, ids = patched(name, method), tokens_of(name)
    want = expected_logits(model, ids)
    own = export_gguf(model, tmp_path / "own.gguf", dtype="float32", tokenizer=tokenizer_of(name))
    exact = engine(own, ids)
    close(exact, want, 1e-2)
    close(engine(own, ids, float32_cache=False), want, 0.1)
    onto = export_gguf(model, tmp_path / "onto.gguf", base=base)
    assert np.array_equal(engine(onto, ids), exact)
    if method != "default":
        far(engine(base, ids), want)
        far(engine(base, ids, float32_cache=False), want)


def test_a_table_that_is_nearly_right_is_seen(base, tmp_path):
    """One pair of sixteen off by a tenth is no rounding."""
    model, ids = patched("llama", "yarn:factor=4"), tokens_of("llama")
    want = expected_logits(model, ids)
    rope_patch.restore(model)
    slot = rope_patch.apply(model, "yarn:factor=4").after[None]
    values = slot.inv_freq.clone()
    values[3] *= 1.1
    table = rope_patch.Table(values=tuple(values.tolist()), attention_scaling=slot.attention_scaling)
    rope_patch.apply(model, table, replace=True)
    assert agreement(engine(export_gguf(model, tmp_path / "m.gguf", base=base), ids), want)[1] > 0.1


@pytest.mark.parametrize(
    ("kind", "same", "off"), [("MOSTLY_F16", 0.99, 0.1), ("MOSTLY_Q8_0", 0.95, 1.0), ("MOSTLY_Q4_K_M", 0.95, 1.5)]
)
def test_a_quantized_base(base, tmp_path, kind, same, off):
    """Against transformers with the weights that its own loader makes of the quantized file.

    The engine rounds activations to 8 bits where weights are quantized, and transformers does not.
    """
    quantized = tmp_path / "base-quantized.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(gguf.LlamaFileType[kind]), 1
    assert not llama_cpp.llama_model_quantize(str(base).encode(), str(quantized).encode(), ctypes.byref(params))
    out = export_gguf(patched("llama", "yarn:factor=4"), tmp_path / "out.gguf", base=quantized)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=quantized.name, dtype=torch.float32).eval()
    rope_patch.apply(model, "yarn:factor=4")
    ids = tokens_of("llama")
    want = expected_logits(model, ids)
    agree, differ = agreement(engine(out, ids), want)
    print(f"{kind}: argmax {agree:.4f}, max difference {differ:.2g}")
    assert agree >= same and differ <= off
    far(engine(quantized, ids), want)


def test_quantizing_keeps_the_table(base, tmp_path):
    patched_file = export_gguf(patched("llama", "yarn:factor=4"), tmp_path / "m.gguf", base=base)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(gguf.LlamaFileType.MOSTLY_Q4_0), 1
    out = tmp_path / "q.gguf"
    assert not llama_cpp.llama_model_quantize(str(patched_file).encode(), str(out).encode(), ctypes.byref(params))
    before, after = read_gguf(patched_file), read_gguf(out)
    assert torch.equal(before.tables[0].inv_freq, after.tables[0].inv_freq)
    assert before.record == after.record and not after.warnings


def test_the_scale_of_the_command_line_is_kept_out(base, tmp_path):
    out, ids = export_gguf(patched("llama", "pi:factor=4"), tmp_path / "m.gguf", base=base), tokens_of("llama")[:100]
    assert np.array_equal(engine(out, ids, rope_freq_scale=0.5), engine(out, ids))


def test_we_read_the_scaling_of_the_engine_itself(base, tmp_path):
    """YaRN left to llama.cpp by its own keys: it computes what transformers does, and we read that table."""
    model, ids = patched("llama", "yarn:factor=4"), tokens_of("llama")
    values = {"type": ("yarn", "STRING"), "factor": (4.0, "FLOAT32"), "original_context_length": (256, "UINT32")}
    keys = [key for key in open_gguf(base).keys.values() if ".rope.scaling." not in key.name]
    keys += [Key.of(f"llama.rope.scaling.{name}", *value) for name, value in values.items()]
    path = write_gguf(tmp_path / "keys.gguf", keys, list(open_gguf(base).pieces))
    close(engine(path, ids), expected_logits(model, ids), 1e-2)
    (slot,), table = read_gguf(path).tables, model.model.rotary_emb
    torch.testing.assert_close(slot.inv_freq, table_of(table.inv_freq.tolist()), rtol=3e-7, atol=0)
    assert slot.attention_scaling == pytest.approx(table.attention_scaling)


def written(out: Path, model, architecture: str, numbers: dict, *more: Key, tensors=()) -> Path:
    """A GGUF of a family that we write onto, and never from its weights: a stand-in for one from elsewhere."""
    config = model.config
    numbers = {
        "context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, **numbers,
    }  # fmt: skip
    keys = [
        Key.of("general.architecture", architecture, "STRING"),
        *(Key.of(f"{architecture}.{name}", value, "UINT32") for name, value in numbers.items()),
        Key.of(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps, "FLOAT32"),
        *vocabulary_keys(tokenizer_of("llama"), 1024),
        *more,
    ]
    pieces = [*pieces_from(weights_of(model), config, architecture, "float32"), *tensors]
    named = [replace(piece, name=piece.name.replace("output_scale", "output_scale.weight")) for piece in pieces]
    return write_gguf(out, keys, named)


def irregular(inv_freq: torch.Tensor, attention_scaling: float) -> rope_patch.Table:
    """A table without any rule."""
    values = inv_freq * (1 + 0.3 * torch.sin(torch.arange(len(inv_freq)) * 2.7))
    return rope_patch.Table(values=tuple(values.tolist()), attention_scaling=attention_scaling)


@pytest.mark.parametrize("method", ["pi:factor=4", "yarn:factor=4", "p_rope:p=0.5", "irregular"])
def test_phi3(tmp_path, method):
    """Onto a GGUF of a random Phi-3, whose graph takes one of two tensors by the length of the context."""
    model, ids = lively(tiny_model("phi3", vocab_size=1024)), tokens_of("llama")[:300]
    base = written(tmp_path / "base.gguf", model, "phi3", {"rope.dimension_count": 16})
    close(engine(base, ids), expected_logits(model, ids), 1e-2)
    rope_patch.apply(model, irregular(model.model.rotary_emb.inv_freq, 1.07) if method == "irregular" else method)
    want = expected_logits(model, ids)
    out = export_gguf(model, tmp_path / "out.gguf", base=base)
    close(engine(out, ids), want, 1e-2)
    close(engine(out, ids[:50], n_ctx=64), want[:50], 1e-2)  # below the context it states, and above: one table
    far(engine(base, ids), want)


@pytest.mark.parametrize("method", ["pi:factor=4", "abf:factor=50:replace_scaling=true", "truncated", "irregular"])
def test_gemma4(tmp_path, method):
    """Onto a GGUF of a random Gemma 4: the table of its full layers, and no change to the sliding ones."""
    model = tiny_model("gemma4", vocab_size=1024, vocab_size_per_layer_input=1024, final_logit_softcapping=30.0)
    model, ids = lively(model), tokens_of("llama")[:300]
    head = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    head |= {f"{name}_swa": 16 for name in head}
    numbers = {"attention.sliding_window": 16, "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 64}
    values = model.model.rotary_emb.full_attention_inv_freq
    plain = 1e6 ** -(torch.arange(16).double() / 16)
    divisors = torch.where(values == 0, 1e30, plain / values).float().numpy()
    base = written(
        tmp_path / "base.gguf",
        model,
        "gemma4",
        head | numbers,
        Key.of("gemma4.rope.freq_base", 1e6, "FLOAT32"),
        Key.of("gemma4.rope.freq_base_swa", 1e4, "FLOAT32"),
        Key.of("gemma4.final_logit_softcapping", 30.0, "FLOAT32"),
        Key.of("gemma4.attention.sliding_window_pattern", [True, False], "ARRAY", "BOOL"),
        tensors=[Piece("rope_freqs.weight", (16,), gguf.GGMLQuantizationType.F32, lambda: divisors)],
    )
    close(engine(base, ids), expected_logits(model, ids), 1e-2)
    rope_patch.apply(model, irregular(plain.float(), 1.0) if method == "irregular" else method)
    want = expected_logits(model, ids)
    close(engine(export_gguf(model, tmp_path / "out.gguf", base=base), ids), want, 1e-2)
    far(engine(base, ids), want)


def lively(model):
    """Random weights large enough that attention is no mean over all positions."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if "embed" in name else 0.2
            parameter.copy_(spread * torch.randn_like(parameter) + (parameter.dim() == 1))
    return model


def test_biases_and_untied_embeddings(tmp_path):
    model = lively(tiny_model("llama", vocab_size=1024, attention_bias=True, mlp_bias=True, tie_word_embeddings=False))
    rope_patch.apply(model, "yarn:factor=4")
    ids = tokens_of("llama")[:300]
    path = export_gguf(model, tmp_path / "m.gguf", dtype="float32", tokenizer=tokenizer_of("llama"))
    close(engine(path, ids), expected_logits(model, ids), 1e-2)


def test_mistral(tmp_path):
    model = lively(tiny_model("mistral", vocab_size=1024, sliding_window=None))
    rope_patch.apply(model, "yarn:factor=4")
    ids = tokens_of("llama")[:300]
    path = export_gguf(model, tmp_path / "m.gguf", dtype="float32", tokenizer=tokenizer_of("llama"))
    close(engine(path, ids), expected_logits(model, ids), 1e-2)


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no checkout of llama.cpp")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_their_converter_writes_the_same_tensors(tmp_path, family):
    """`LLAMA_CPP=DIR make test-engines`, with sentencepiece, which their script imports: byte for byte the same."""
    options = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {"sliding_window": None}
    model = lively(tiny_model(family, vocab_size=264, **options))
    model.save_pretrained(tmp_path / "folder")
    sentencepiece().save_pretrained(tmp_path / "folder")
    script, theirs = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py", tmp_path / "theirs.gguf"
    command = [sys.executable, script, tmp_path / "folder", "--outtype", "f16", "--outfile", theirs]
    subprocess.run(command, check=True, capture_output=True)
    ours = export_gguf(tmp_path / "folder", tmp_path / "ours.gguf")
    read = [
        {t.name: (t.tensor_type, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors} for path in (ours, theirs)
    ]
    assert read[0] == read[1]
    keys = [{key.name: key.value for key in open_gguf(path).keys.values()} for path in (ours, theirs)]
    differ = {name for name in keys[1] if name.startswith("llama.") and keys[0].get(name) != keys[1][name]}
    assert differ <= {"llama.rope.scaling.type"}
    rope_patch.apply(model, "yarn:factor=4")
    ids = torch.randint(3, 264, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    close(engine(export_gguf(model, tmp_path / "onto.gguf", base=theirs), ids), expected_logits(model, ids), 0.1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}}]
)
def test_an_adapter_on_the_patched_base(base, tmp_path, options):
    """First the table, then the adapter: as the merged model. The adapter on the plain base is something else."""
    from peft import LoraConfig, get_peft_model

    model = patched("llama", "yarn:factor=4")
    onto = export_gguf(model, tmp_path / "base.gguf", base=base)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    rope_patch.save(adapted, tmp_path / "adapter")
    lora = export_gguf_lora(tmp_path / "adapter", tmp_path / "adapter.gguf")
    ids = tokens_of("llama")
    want = expected_logits(adapted.merge_and_unload().eval(), ids)
    close(engine(onto, ids, lora_path=str(lora)), want, 1e-2)
    far(engine(onto, ids), want)
    far(engine(base, ids, lora_path=str(lora)), want)


@pytest.mark.parametrize("text", [TEXT[:3000], "It's 1234567 — naïve?\n\n\tdef f(x):  return x  ", " "])
def test_the_engine_splits_text_as_the_tokenizer_does(plain, text):
    name, path = plain
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        assert llama.tokenize(text.encode(), add_bos=True) == tokenizer_of(name)(text).input_ids
    finally:
        llama.close()


@pytest.mark.parametrize(("method", "harmless"), [("pi:factor=4", True), ("yarn:factor=4", False)])
def test_a_context_shift_scales_keys_twice(base, tmp_path, method, harmless):
    """Why the documentation warns of it: moved keys are rotated again, and multiplied by the scaling again."""
    path, ids = export_gguf(patched("llama", method), tmp_path / "m.gguf", base=base), tokens_of("llama")[:101]
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llama = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, n_threads=1, verbose=False, **cache)
    try:
        llama.eval(ids)
        straight = np.array(llama.scores[100])
        llama.reset()
        llama.eval(ids[:100])
        llama_cpp.llama_memory_seq_add(llama_cpp.llama_get_memory(llama.ctx), 0, 0, -1, 8)
        llama.n_tokens = 108
        llama.eval(ids[100:])
        off = float(np.abs(llama.scores[108] - straight).max())
    finally:
        llama.close()
    assert (off < 1e-3) is harmless
