"""Statements for other programs: what is printed is done as the program does it, and gives the logits of the patch."""

import json
import shlex

import pytest
import torch
import yaml
from support.commands import fail, run
from support.patches import config_of, read_json, saved_with
from support.program_options import flags
from support.subsets import covering
from support.tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.engines.statements import STATEMENTS

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "olmo2", "phi3", "gpt_oss", "gpt_neox"]
METHODS = ["yarn:factor=4", "p_rope:p=0.75", "abf:factor=4", "pi:factor=4"]


def transformers(source, lines):
    return eval("\n".join(lines))


def trl(source, lines):
    keys = eval("\n".join(lines).replace("SFTConfig", "dict"))["model_init_kwargs"]
    return AutoModelForCausalLM.from_pretrained(source, **keys)


def axolotl(source, lines):
    config = AutoConfig.from_pretrained(source)
    for key, value in yaml.safe_load("\n".join(lines))["overrides_of_model_config"].items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_pretrained(source, config=config)


def ms_swift(source, lines):
    words = shlex.split(" ".join(lines))
    config = AutoConfig.from_pretrained(source)
    config.rope_scaling = json.loads(words[words.index("--rope_scaling") + 1])
    config.max_position_embeddings = int(words[words.index("--max_model_len") + 1])
    return AutoModelForCausalLM.from_pretrained(source, config=config)


PROGRAMS = {"transformers": transformers, "trl": trl, "axolotl": axolotl, "ms-swift": ms_swift}


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated")
@covering(family=FAMILIES, method=METHODS)
def test_what_is_pasted_gives_the_logits_of_the_patch(family, method, tmp_path):
    source = saved_with(tiny_model(family), tmp_path / "base")
    ids = torch.arange(200)[None] % 60
    patched = AutoModelForCausalLM.from_pretrained(source)
    rope_patch.apply(patched, method)
    with torch.no_grad():
        expected = patched.eval()(ids).logits
        model = AutoModelForCausalLM.from_pretrained(source, **rope_patch.settings(source, method))
        assert torch.equal(model.eval()(ids).logits, expected)
        for program, load in PROGRAMS.items():
            model = load(source, flags(source, method, program).lines)
            assert torch.equal(model.eval()(ids).logits, expected), program


@pytest.mark.parametrize("program", ["transformers-4", "mlx"])
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_a_scaling_of_the_checkpoint_does_not_stay_beside_the_new_keys(kind, program, tmp_path):
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaled |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = saved_with(tiny_model("llama", rope_parameters={"rope_theta": 1e4, **scaled}), tmp_path / "base")
    patched = AutoModelForCausalLM.from_pretrained(source)
    rope_patch.apply(patched, "ntk:factor=4")
    keys = flags(source, "ntk:factor=4", program).settings
    path = tmp_path / "base" / "config.json"
    stated = read_json(path) | keys
    path.write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    ids = torch.arange(200)[None] % 60
    with torch.no_grad():  # transformers 5 reads the older keys as version 4 does
        model = AutoModelForCausalLM.from_pretrained(source)
        assert torch.equal(model.eval()(ids).logits, patched.eval()(ids).logits)


def test_a_checkpoint_that_lost_its_base_is_refused(tmp_path):
    folder = saved_with(tiny_model(), tmp_path / "base")
    config = config_of(folder)
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="without its base"):
        rope_patch.settings(folder, "yarn", target_length=1024)


def test_the_command_names_every_program_and_those_that_cannot_state_it(tmp_path):
    source = saved_with(tiny_model(), tmp_path / "base")
    printed = run("settings", source, "yarn", "factor=4")
    assert [line.partition(":")[0] for line in printed.splitlines() if line[0] != " "] == sorted(
        STATEMENTS, key=lambda name: (name in ("llama-factory", "verl"), list(STATEMENTS).index(name))
    )
    several = json.loads(run("settings", source, "yarn:factor=4", "--for", "trl axolotl", "--for", "mlx", "--json"))
    assert [one["program"] for one in several] == ["trl", "axolotl", "mlx"]
    assert "apply MODEL METHOD -o FOLDER" in fail("settings", source, "yarn:factor=4", "--for", "verl")
    assert "transformers-4" in fail("settings", source, "yarn:factor=4", "--for", "megatron")
    with pytest.raises(ValueError, match="GGUF"):
        rope_patch.settings(tmp_path / "model.gguf", "yarn:factor=4")
