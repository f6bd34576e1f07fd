"""The configs of the recipe: a step of each in shapes alone, and what its header says of GPUs and of its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from support.recipe_runs import recipe
from support.subsets import full
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch.patching.locate import locate
from rope_patch.planning.shapes import shape_of
from rope_patch.runtime.packaged import data_path
from rope_patch.training.models import BUNDLED_MODELS, prepare_model, training_plan
from rope_patch.training.trainer import training_arguments

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
GIB = 2**30
BASE = ("model.name=llama", "data.length=512", "output=x")
FILES = sorted(CONFIGS.glob("*.yaml"))
PAIRS = [
    (CONFIGS / f"{first}.yaml", second)
    for second in FILES
    for first in re.findall(r"recipes/configs/(\S+)\.yaml recipes/configs/\S+\.yaml", second.read_text("utf-8"))
]
NAMED = [path for path in FILES if re.search(r"-\d+k$", path.stem)]
ALONE = [(path,) for path in FILES if path not in {second for _, second in PAIRS}]  # the others go after one of these
FIRST = ("llama-3-8b-32k", "llama-3.1-8b-32k+qlora", "qwen3-8b-128k+pose", "gemma-2-9b-32k", "gemma-3-4b-128k")
FIRST += ("llama-3-8b-32k+truncated", "chat")


def name_of(files):
    return "+".join(path.stem for path in files)


# One of each family and of each kind of run is in `make test`.
RUNS = [files if name_of(files) in FIRST else full(files) for files in ALONE + PAIRS]
every_run = pytest.mark.parametrize("files", RUNS, ids=name_of)
every_named_config = pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)


def llama31(factor):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"max_position_embeddings": 131072, "rope_parameters": rope | {"original_max_position_embeddings": 8192}}


def plain(context, theta):
    return {"max_position_embeddings": context, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# As the config.json of each checkpoint says it.
ROPES = {
    "Llama-3-8B": plain(8192, 5e5),
    "Llama-3.1-8B": llama31(8.0),
    "Llama-3.2-1B": llama31(32.0),
    "Llama-3.2-3B": llama31(32.0),
    "Qwen2.5-7B": plain(131072, 1e6),
    "Qwen3-8B": plain(40960, 1e6),
    "gemma-2-9b": plain(8192, 1e4),
    "gemma-3-4b": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


# The length each was trained at, by its model card or report: Qwen's base models state more than that.
def two_layers(options):
    """The model of a run without weights, on the meta device, cut to two layers (of both kinds, where it has two)."""
    name = options.model.name if options.model.name in BUNDLED_MODELS else shape_of(options.model.name).name
    shipped = data_path("assets") / (f"{name}/config.json" if name in BUNDLED_MODELS else f"configs/{name}.json")
    shape = json.loads(shipped.read_text(encoding="utf-8")) | ROPES.get(name, {})
    if name.startswith("gemma"):
        shape["layer_types"] = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(**shape | {"num_hidden_layers": 2})
    with torch.device("meta"):  # eager: kernels may have no form for shapes alone
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.model.dtype), attn_implementation="eager"
        )


@every_run
@pytest.mark.filterwarnings("ignore:there is no patch.method")
def test_a_step_in_shapes_alone(files, tmp_path):
    """Patch, adapters, a pass forward and backward; and transformers accepts the arguments of the training."""
    options = recipe(*BASE, *files)
    model = two_layers(options)
    model = prepare_model(model, options)
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
    assert training_arguments(options, tmp_path).max_steps == options.train.steps
    assert "fits into 141" in training_plan(options).describe(141)


# --- what a header says

LAUNCH = re.compile(r"^#   (\d+) x (\d+) GB +(\S+)\.yaml +(?:with (\S+) +)?([0-9.]+) GiB$", re.MULTILINE)


@every_named_config
def test_the_launch_files_of_a_header_are_those_of_the_plan(path):
    rows = LAUNCH.findall(path.read_text(encoding="utf-8"))
    assert [count for count, *_ in rows][:1] == ["1"]
    for count, size, launch, added, shown in rows:
        file = yaml.safe_load((CONFIGS / "accelerate" / f"{launch}.yaml").read_text(encoding="utf-8"))
        assert file["num_processes"] == int(count)
        shared = file.get("parallelism_config", {})
        sharing = shared.get("parallelism_config_cp_size", 1)
        more = [CONFIGS / added if added.endswith(".yaml") else added] if added else []
        options = recipe(path, *more)
        planned = training_plan(options).but(gpus=int(count), context_parallel=sharing)
        assert float(shown) == pytest.approx(planned.total / GIB, abs=0.06)
        assert planned.total <= 0.95 * int(size) * GIB  # a GPU of 80 GB has 79.6 GiB, some of them taken
        assert sharing == 1 or not any(layer.window for layer in planned.shape.kinds)


@every_named_config
def test_the_table_of_the_readme_is_predicted(path):
    page = (CONFIGS.parent / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| \[{re.escape(path.stem)}\]\(configs/{re.escape(path.name)}\) \|(.*)\|$", page, re.M)
    cells = [cell.strip() for cell in row.split("|")]
    options = recipe(path)
    quantized = training_plan(recipe(path, CONFIGS / "qlora.yaml"))
    assert cells[0].strip("`") == str(options.patch.method).partition(":original")[0]
    assert cells[1] == str(options.target_length)
    assert int(cells[2]) == pytest.approx(training_plan(options).total / GIB, abs=0.51)
    assert int(cells[3]) == pytest.approx(quantized.total / GIB, abs=0.51)
