"""Damaged files given to commands: one line says which file it is and what is wrong, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import re
import shutil

import pytest
from support.commands import MEASURE, fail, invoke
from support.gguf_files import rewritten, write_toy
from support.patches import config_of, lora, patched_model, read_json
from support.tiny import LLAMA, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.gguf.patch import patch_gguf
from rope_patch.gguf.table import RECORD_KEY
from rope_patch.options import COMMANDS as OPTIONS
from rope_patch.options.fields import leaves
from rope_patch.runtime.gguf_file import Key

COMMANDS = {
    "doctor": ("doctor", "DIR"),
    "apply": ("apply", "DIR", "yarn:factor=4", "--target-length", "256", "-o", "out"),
    "plan": ("plan", "DIR", "--length", "1k"),
    "export": ("export", "DIR", "--to", "vllm", "--method", "p_rope:p=0.5", "-o", "out"),
    "compare": ("compare", "DIR", "--methods", "default", *MEASURE, "-o", "out"),
    "analyze": ("analyze", "DIR", "--tokens", "64", "--window", "32", "--p", "", "--no-report", "-o", "out"),
}
BUILD = "transformers cannot build the model|no tokenizer that can be loaded"
CONFIGS = {
    "unknown rope_type": ({"rope_parameters": {"rope_type": "nonsense"}}, BUILD),
    "yarn without a factor": ({"rope_parameters": {"rope_type": "yarn"}}, BUILD),
    "a type that is a list": ({"model_type": ["llama"]}, BUILD),
    "an unknown type": ({"model_type": "unheard_of"}, BUILD),
    "quantized by a word": ({"quantization_config": "4bit"}, BUILD),
}

SHOWN = {  # by doctor, as checks that cannot be made
    "pi by zero": ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "not finite"),
    "a context of zero": ({"max_position_embeddings": 0}, "max_position_embeddings must be a number of tokens"),
    "more tokens than an integer of torch": (
        {"max_position_embeddings": 10**30},
        "model: max_position_embeddings must",
    ),
    "a class that is a number": ({"architectures": 3}, "architectures must be a list of class names, got 3"),
}
CONFIGS |= SHOWN


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint, a patched one, and an adapter over the patched one."""
    root = tmp_path_factory.mktemp("checkpoints")
    tiny_model().save_pretrained(root / "base")
    rope_patch.save(patched_model("yarn:factor=4", target_length=256), root / "patched")
    rope_patch.save(lora(rope_patch.load(root / "patched")), root / "adapter")
    return root


@pytest.fixture
def record(checkpoints, tmp_path):
    """The patch record of the patched checkpoint, which is copied with the adapter."""
    for name in ("patched", "adapter"):
        shutil.copytree(checkpoints / name, tmp_path / name)
    return config_of(tmp_path / "patched")["rope_patch"]


def refused(folder, *words) -> str:
    """Run a command in a folder; return its error line, after checking that there is but one and nothing was left."""
    before = sorted(folder.iterdir())
    with contextlib.chdir(folder):
        *_, line = fail(*words).strip().splitlines()
    assert line.startswith("error: ")
    assert "ROPE_PATCH_DEBUG" not in line
    assert sorted(folder.iterdir()) == before
    return line


def edit(path, **changes):
    path.write_text(json.dumps(read_json(path) | changes))


@pytest.mark.parametrize(
    ("damage", "command"),
    [
        *((damage, "apply" if i % 2 or damage in SHOWN else "doctor") for i, damage in enumerate(CONFIGS)),
        *(("yarn without a factor", c) for c in COMMANDS if c not in ("apply", "doctor")),
        *(("an unknown type", c) for c in COMMANDS if c not in ("apply", "doctor")),
        *(("a context of zero", c) for c in COMMANDS if c not in ("apply", "doctor", "plan")),  # plan reads no table
    ],
)
def test_a_config_that_describes_no_model(checkpoints, tmp_path, damage, command):
    changes, message = CONFIGS[damage]
    # What measures needs a tokenizer, too, and reads it first.
    shutil.copytree(LLAMA if command in ("compare", "analyze") else checkpoints / "base", tmp_path / "model")
    edit(tmp_path / "model" / "config.json", **changes)
    words = [word.replace("DIR", "model") for word in COMMANDS[command]]
    assert re.search(message, refused(tmp_path, *words))


def test_an_adapter_that_does_not_fit_is_not_measured_as_its_base(tmp_path):
    folder = rope_patch.save(lora(rope_patch.load(LLAMA, "yarn:factor=4", target_length=1024)), tmp_path / "adapter")
    edit(folder / "adapter_config.json", target_modules=["k_proj"])
    words = [word.replace("DIR", "adapter") for word in COMMANDS["compare"]]
    assert "unknown to the model: base_model.model" in refused(tmp_path, *words)


BROKEN = ["", "null", "3", "[]", '"yarn"', "{", "\udcff"]
FILES = ["config.json", "adapter_config.json", "rope_patch.json"]


@pytest.mark.parametrize(
    ("name", "command", "text"),
    [
        *((name, "export", text) for name in FILES for text in BROKEN),
        *((name, command, text) for name in FILES for command in ("doctor", "apply", "plan") for text in ("", "[]")),
    ],
)
def test_a_file_that_is_no_json_object(checkpoints, tmp_path, name, command, text):
    source = "base" if name == "config.json" else "adapter"
    shutil.copytree(checkpoints / source, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(text.encode(errors="surrogateescape"))
    words = [word.replace("DIR", "model") for word in COMMANDS[command]]
    if source == "adapter" and command == "export":
        words = words[:4] + words[6:]  # an adapter has a method of its own
    if (command, name) == ("doctor", "rope_patch.json"):
        said = " ".join(invoke("doctor", tmp_path / "model").stdout.split())
        assert f"{name} " in said and "copy or download it again" in said
        return
    line = refused(tmp_path, *words)
    if source == "base" or command == "export":  # the others name the adapter, which they do not take
        assert f"{name} " in line
        assert "copy or download it again" in line


RECORDS = {
    "method": ([None, {}, {"method": "yarn", "factor": [1]}, {"method": "chain", "steps": [3]}]),
    "layer_types": ([None, [], [3]]),
    "tables": ([None, {"all": 3}, {"all": {"inv_freq": [[1]], "attention_scaling": 1, "hash": ""}}]),
    "base_tables": ([None, {"other": None}]),
    "base_config": ([None, {"rope_parameters": {}, "max_position_embeddings": 0}]),
    "target_length": ([0, 2**63, True]),
    "precision": (["float16"]),
    "freeze_at": ([-1]),
    "edited": ([None]),
    "schema": ([99]),
}


@pytest.mark.parametrize(
    ("key", "value", "every"),
    [(key, value, not i) for key, values in RECORDS.items() for i, value in enumerate(values)],
)
def test_a_record_that_is_malformed(record, tmp_path, key, value, every):
    """In a checkpoint's config and beside an adapter, the line says which key of the record is wrong."""
    edit(tmp_path / "patched" / "config.json", rope_patch=record | {key: value})
    edit(tmp_path / "adapter" / "rope_patch.json", **{key: value})
    assert key in invoke("doctor", tmp_path / "patched").stdout
    commands = [("export", "adapter", "--to", "vllm", "-o", "out")]
    if every:  # of each key one
        commands += [("restore", "patched", "-o", "out")]
    for words in commands:
        line = refused(tmp_path, *words)
        assert "record" in line
        assert key in line or "parameter" in line or "method" in line


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoConfig": "configuration.Config"}},
        {"num_hidden_layers": 1},
        {"head_dim": 16},
        {"original_max_position_embeddings": [64]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": "4"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
    ],
)
def test_a_record_restores_rotary_settings_alone(record, tmp_path, change):
    """A folder, the model of it, an adapter and a GGUF file are refused alike, with the file and the key."""
    record["base_config"] |= change
    edit(tmp_path / "patched" / "config.json", rope_patch=record)
    edit(tmp_path / "adapter" / "rope_patch.json", base_config=record["base_config"])
    patch_gguf(
        write_toy(tiny_model(vocab_size=1024), tmp_path / "m.gguf"), "yarn", tmp_path / "p.gguf", target_length=256
    )
    rewritten(tmp_path / "p.gguf", tmp_path / "altered.gguf", keys=[Key.of(RECORD_KEY, json.dumps(record))])
    key = [*change, *change.get("rope_parameters", ())][-1]
    for name in ("patched", "adapter", "altered.gguf"):
        diagnosis = rope_patch.doctor(tmp_path / name)
        assert not diagnosis.ok and key in str(diagnosis)
        with pytest.raises(rope_patch.PatchError, match=rf"(?s){name}.*{key}"):
            rope_patch.verify(tmp_path / name)
    with pytest.raises(rope_patch.PatchError, match=f"patched.*{key}"):
        rope_patch.restore(AutoModelForCausalLM.from_pretrained(tmp_path / "patched"))
    assert key in refused(tmp_path, "restore", "patched", "-o", "out")


def test_control_characters_of_a_file_do_not_reach_the_terminal(record, tmp_path):
    newer = record | {"schema": 99, "package_version": "\x1b[2J9.0\x9b"}
    edit(tmp_path / "patched" / "config.json", rope_patch=newer)
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="\x1b]0;base\x07", bias="\x1b[2J")
    for words in (("doctor", "patched"), ("restore", "patched", "-o", "out"), ("apply", "adapter", "pi", "-o", "out")):
        with contextlib.chdir(tmp_path):
            result = invoke(*words)
        assert result.exit_code != 0 and not set(result.stdout + result.stderr) & set("\x1b\x07\x9b")


GGUF_KEYS = {
    "llama.rope.freq_base": ["x", 0.0, -1.0, float("nan"), float("inf")],
    "llama.rope.scaling.attn_factor": ["x", float("nan")],
    "llama.rope.scaling.factor": ["x"],
    "llama.rope.scaling.original_context_length": ["x"],
    "llama.context_length": ["x"],
    "llama.rope.dimension_count": ["x", 0, 2**31],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GGUF_KEYS.items() for value in values])
def test_a_gguf_file_with_a_key_that_is_no_number(tmp_path, key, value):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    keys = {"llama.embedding_length": 64, "llama.attention.head_count": 4, "llama.context_length": 64, key: value}
    for name, stated in keys.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(stated)]
        add(name, stated)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    line = refused(tmp_path, "doctor", "model.gguf")
    assert "model.gguf" in line
    assert key in line or "how many features rotate" in line


METHODS = [
    "yarn:factor=1e308",
    "yarn:factor=4:beta_fast=1e-320:beta_slow=1e-322",
    "yarn:factor=4:mscale=1:mscale_all_dim=-7.213475204444817",
    "yarn:factor=4:attention_factor=1e300",
    "table:attention_scaling=1e-300",
    "truncated:cutoff_low=0:cutoff_high=1:floor=1e300",
    "longrope:factors=1e-300/1/1/1/1/1/1/1",
    "abf:rope_theta=1e-300",
]


@pytest.mark.parametrize("method", METHODS)
def test_numbers_that_give_no_table(checkpoints, tmp_path, method):
    refused(tmp_path, "apply", checkpoints / "base", method, "-o", "out")


def test_lengths_beyond_reason(tmp_path):
    line = refused(tmp_path, "plan", "Llama-3-8B", "--length", "9" * 23 + "k")
    assert "a length is at most" in line


TOKENIZERS = {"tokenizer_config.json": ["", "[]", "null", "3"], "tokenizer.json": ["", "null", '"x"', '{"model": 3}']}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TOKENIZERS.items() for text in texts])
def test_a_tokenizer_that_cannot_be_read(tmp_path, name, text):
    shutil.copytree(LLAMA, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    words = [word.replace("DIR", "model") for word in COMMANDS["compare"]]
    assert "model has no tokenizer" in refused(tmp_path, *words)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_an_index_of_weights_that_cannot_be_read(tmp_path, text):
    shutil.copytree(LLAMA, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    for command in ("apply", "export", "compare"):
        assert "model" in refused(tmp_path, *(word.replace("DIR", "model") for word in COMMANDS[command]))


WRITING = {
    "apply": ("apply", "BASE", "abf", "-o"),
    "analyze": ("analyze", LLAMA, "--tokens", "64", "--window", "32", "--p", "", "--no-report", "-o"),
    "compare": ("compare", LLAMA, "--methods", "default", *MEASURE, "-o"),
    "export": ("export", "BASE", "--to", "hf", "-o"),
    "restore": ("restore", "PATCHED", "-o"),
    "doctor": ("doctor", "PATCHED", "--repair", "-o"),
    "kv-check": ("kv-check", LLAMA, "--formats", "int8-token", *MEASURE, "-o"),
    "extend": ("extend", LLAMA, "--length", "1k", "--no-report", "-o"),
    "demo": ("demo", "-o"),
    "finetune": ("finetune", "--smoke", "-o"),
    "recipes": ("recipes", "copy"),
}
"""A command line for each command that writes, up to the name of its output."""


def test_every_command_that_writes_is_known_here():
    writing = {name for name, kind in OPTIONS.items() if any("-o" in leaf.short for leaf in leaves(kind))}
    assert writing | {"recipes"} == set(WRITING)


@pytest.mark.parametrize("output", ["new/../out", "new/.."])
@pytest.mark.parametrize("command", WRITING)
def test_an_output_behind_a_folder_that_does_not_exist_is_refused_first(checkpoints, tmp_path, command, output):
    places = {"BASE": checkpoints / "base", "PATCHED": checkpoints / "patched"}
    assert "leads through" in refused(tmp_path, *(places.get(word, word) for word in WRITING[command]), output)
