"""The configs of the recipe: a step of each in shapes alone, and what its header says of GPUs and of its table."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.commands import run
from support.recipe_runs import arguments, needs_trl, recipe
from support.releases import LLAMA3, RELEASES
from support.subsets import full
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.patching.locate import locate
from rope_patch.planning.shapes import shape_of
from rope_patch.runtime.packaged import data_path
from rope_patch.training.checks import build
from rope_patch.training.models import BUNDLED_MODELS, lora_arguments, patch_arguments, training_plan

pytestmark = needs_trl

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
GIB = 2**30
BASE = ("model.name=llama", "train.max_length=512", "output=x")
FILES = sorted(CONFIGS.glob("*.yaml"))
PAIRS = [
    (CONFIGS / f"{first}.yaml", second)
    for second in FILES
    for first in re.findall(r"recipes/configs/(\S+)\.yaml recipes/configs/\S+\.yaml", second.read_text("utf-8"))
    if first != second.stem
]
OVERLAYS = ("abf", "p_rope", "pi", "truncated", "yarn")
SITUATIONS = [path for path in FILES if path.stem not in OVERLAYS]
FIRST = ("first_run", "32k", "32k+qlora", "pose", "several_gpus", "32k+truncated", "chat")


def name_of(files):
    return "+".join(path.stem for path in files)


# One of each family and of each kind of run is in `make test`.
RUNS = [*((path,) for path in SITUATIONS), *PAIRS]
RUNS = [files if name_of(files) in FIRST else full(files) for files in RUNS]
every_run = pytest.mark.parametrize("files", RUNS, ids=name_of)
every_situation = pytest.mark.parametrize("path", SITUATIONS, ids=lambda path: path.stem)


# As the config.json of each checkpoint says it, but for the bases of those that are not scaled.
PLAIN = {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
LLAMA31 = {"max_position_embeddings": 131072, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}
GEMMA3 = {"max_position_embeddings": 131072, "rope_parameters": RELEASES["Gemma 3 4B"][2]}
ROPES = {**dict.fromkeys(("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-3B"), LLAMA31), "gemma-3-4b": GEMMA3}


def two_layers(options):
    """The model of a run without weights, on the meta device, cut to two layers (of both kinds, where it has two)."""
    name = options.model.name if options.model.name in BUNDLED_MODELS else shape_of(options.model.name).name
    shipped = data_path("assets") / (f"{name}/config.json" if name in BUNDLED_MODELS else f"configs/{name}.json")
    shape = PLAIN | json.loads(shipped.read_text(encoding="utf-8")) | ROPES.get(name, {})
    if name.startswith("gemma"):
        shape["layer_types"] = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(**shape | {"num_hidden_layers": 2})
    with torch.device("meta"):  # eager: kernels may have no form for shapes alone
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.model.dtype), attn_implementation="eager"
        )


@every_run
@pytest.mark.filterwarnings("ignore:there is no patch.method")
def test_a_step_in_shapes_alone(files):
    """Patch, adapters, a pass forward and backward; and transformers accepts the arguments of the training."""
    options = recipe(*BASE, *files)
    model = two_layers(options)
    rope_patch.apply(model, options.patch.method or "default", **patch_arguments(model, options))
    if options.lora_rank:
        model = get_peft_model(model, build(LoraConfig, "lora", lora_arguments(model, options)))
    record = locate(model).record
    assert record is not None and (
        options.patch.method is None or record.changed == (options.patch.method != "default")
    )
    assert locate(model).config.max_position_embeddings >= options.target_length
    ids = torch.zeros(1, 32, dtype=torch.long, device="meta")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.shape == () and loss.is_meta
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.grad is not None and p.grad.shape == p.shape for p in trained.values())
    args = arguments(options)
    assert args.max_steps == options.train["max_steps"]
    assert training_plan(options, args).fits(141)


@pytest.mark.full  # half a minute each
@every_run
def test_it_runs_at_its_smoke_size(files, tmp_path):
    few = ("train.max_steps=1", "evaluation.lengths=256", "evaluation.before=false", f"output={tmp_path / 'out'}")
    run("finetune", *files, "--smoke", *few)
    assert (tmp_path / "out" / "results.json").is_file()


# --- what a header says

MEMORY = re.compile(r"Memory: ([0-9.]+) GiB")
GPU = re.compile(r"GPUs? of (\d+) GB")


@every_situation
def test_a_header_says_what_the_plan_predicts(path, monkeypatch):
    """The memory, a GPU that has it, and the number of tokens that are read."""
    text = path.read_text(encoding="utf-8")
    options = recipe(path)
    args = arguments(options)
    planned = training_plan(options, args)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if "eight GPUs" in text:
        planned = planned.but(gpus=8, context_parallel=8)
    said = re.search(r"reads (\d+) million", text.replace("\n# ", " "))
    if said:
        assert int(said[1]) == round(args.max_steps * rows * options.max_length / 1e6)
    assert float(MEMORY.search(text)[1]) == pytest.approx(planned.total / GIB, abs=0.06)
    assert planned.total <= 0.95 * int(GPU.search(text)[1]) * GIB  # a GPU of 80 GB has 79.6 GiB, some of them taken


def test_the_readme_lists_every_config():
    page = (CONFIGS.parent / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in FILES} == set(re.findall(r"\]\(configs/(\w+)\.yaml\)", page))
