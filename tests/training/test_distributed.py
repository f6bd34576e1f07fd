"""More than one device: two processes over gloo give what one gives; rows that devices share; the launch configs."""

import os

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from support import distributed_child as child
from support.distributed_child import fused
from support.forks import together
from support.recipe_runs import needs_trl
from support.scored import bold_model
from torch.distributed.fsdp import StateDictType

from rope_patch.checkpoints.adapters import RECORD_FILE, read_record
from rope_patch.runtime import packaged as _paths

pytestmark = [pytest.mark.slow, needs_trl]

SHARDED = ["by accelerate", "tied", "whole"]


# --- two processes, started once


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes found, each for itself."""
    folder = tmp_path_factory.mktemp("two")
    bold_model().save_pretrained(folder / "base")
    together(lambda rank: child.main(folder), folder)
    return folder, [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same training in this process alone."""
    return child.train(tmp_path_factory.mktemp("one"), 2)


@pytest.fixture(scope="module")
def steps():
    """A step of a model that is not sharded: loss and gradients, by kind of model."""
    models = {
        "whole": child.full(),
        "tied": child.tuned(tied=True),
        "lora": child.tuned(),
    }
    return {name: (child.step(fused(model)), child.measure(model)) for name, model in models.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_train_as_one_does(two, one, rank):
    """Rows with unequal numbers of labels, some of none at all: no mean of means or average of sums is the mean."""
    result = two[1][rank]["whole"]
    assert result["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert len(one["losses"]) == 2 and abs(one["losses"][0] - one["losses"][1]) > 0.01
    moved = dict(child.tuned().named_parameters())
    for name, tensor in one["adapter"].items():
        assert torch.allclose(result["adapter"][name], tensor, atol=1e-5), name
        assert not torch.allclose(moved[name], tensor, atol=1e-4), name


def test_a_checkpoint_is_written_by_one_process_and_resumed_by_both(two):
    folder, ranks = two
    assert [bool(rank["whole"]["written"]) for rank in ranks] == [True, False], "records, by the first process"
    assert [path.parent.name for path in folder.glob(f"whole/*/{RECORD_FILE}")] == ["checkpoint-2"]
    assert str(read_record(folder / "whole" / "checkpoint-2").to_method()) == "yarn:factor=4"
    for rank in ranks:
        assert len(rank["cut"]["losses"]) == 1
        assert rank["resumed"]["losses"] == pytest.approx(rank["whole"]["losses"], abs=1e-5)
        for name, tensor in rank["whole"]["adapter"].items():
            assert torch.allclose(rank["resumed"]["adapter"][name], tensor, atol=1e-6), name


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_has_the_same_loss_and_gradients(two, steps, name):
    """FSDP2 over layers and root, and as accelerate shards: with the head on its own, and slices unequal in number."""
    expected, _ = steps.get(name, steps["lora"])
    for rank in two[1]:
        for step in rank["sharded"][name]["steps"]:
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["gradients"].keys() == expected["gradients"].keys()
            for key, gradient in expected["gradients"].items():
                assert torch.allclose(step["gradients"][key], gradient, atol=1e-5), key
    assert any(gradient.abs().max() > 1e-3 for gradient in expected["gradients"].values())


def test_the_table_survives_sharding_and_bfloat16(two, steps):
    expected, nll = steps["lora"]
    for rank in two[1]:
        result = rank["sharded"]
        assert {result[name]["verified"] for name in (*SHARDED, "bf16")} == {"verified"}
        assert result["alone"] == "verified", "by one process alone too, as when it writes a checkpoint"
        assert result["bf16"]["steps"][0]["loss"] == pytest.approx(expected["loss"], rel=0.03)
        assert result["bf16"]["steps"][0]["loss"] != pytest.approx(expected["loss"], rel=1e-6), "it is rounded"
        assert result["bf16"]["nll"] == pytest.approx(nll, rel=0.03)


def test_doctor_finds_the_table_that_one_process_has_rounded(two):
    """Of models that accelerate sharded: one patched, one plain, and that with its table cast in the second process."""
    assert [rank["sharded"]["doctor"] for rank in two[1]] == [[0, 0, 0], [0, 0, 1]]


def test_a_model_that_one_process_loads_is_patched_in_all(two, steps):
    """cpu_ram_efficient_loading: the others patch a model without weights, and get them afterwards."""
    expected, nll = steps["lora"]
    for rank in two[1]:
        result = rank["loaded by one"]
        assert result["verified"] == "verified"
        assert result["nll"] == pytest.approx(nll, rel=1e-5)
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("name", SHARDED)
def test_the_engines_read_a_sharded_model(two, steps, name):
    """Before the root has run at all, and between steps; perplexity in one pass, in chunks, in windows."""
    _, expected = steps.get(name, steps["lora"])
    assert two[1][0]["sharded"][name]["model_hash"] == two[1][1]["sharded"][name]["model_hash"]
    for rank in two[1]:
        assert rank["sharded"][name]["before"] == pytest.approx(expected, rel=1e-5)
        assert rank["sharded"][name]["after"] == pytest.approx(expected, rel=1e-5)


# --- configs for accelerate launch


FOLDER = _paths.data_path("recipes") / "configs" / "accelerate"
CONFIGS = {
    "one_gpu": (1, 1),
    "two_gpus_fsdp2": (2, 1),
    "eight_gpus_fsdp2": (8, 1),
    "eight_gpus_context_parallel": (8, 8),
    "two_nodes_fsdp2": (16, 1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_launch_config_is_what_accelerate_reads(name, monkeypatch):
    processes, shared = CONFIGS[name]
    parser = launch_command_parser()
    words = ["--config_file", str(FOLDER / f"{name}.yaml"), *(("--machine_rank", "1") if "nodes" in name else ())]
    known = vars(parser.parse_args(["recipes/finetune_lora.py"]))
    asked, config, _ = _validate_launch_command(parser.parse_args([*words, "recipes/finetune_lora.py"]))
    assert {*config.fsdp_config, *config.parallelism_config} <= set(known), "accelerate has these options"
    prefixes = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_")
    for key in [key for key in os.environ if key.startswith(prefixes)]:
        monkeypatch.delenv(key)
    if processes > 1:
        for key, value in prepare_multi_gpu_env(asked).items():
            if key.startswith(prefixes):
                monkeypatch.setenv(key, value)
    assert asked.num_processes == processes
    assert asked.mixed_precision == "bf16" and config.num_machines == (2 if "nodes" in name else 1)
    parallelism = (
        ParallelismConfig() if asked.use_parallelism_config else ParallelismConfig(dp_replicate_size=processes)
    )
    assert parallelism.cp_size == shared and parallelism.total_size == processes
    if config.distributed_type == DistributedType.FSDP:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
        assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
        assert plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing
        model = bold_model()
        plugin.set_auto_wrap_policy(model)
        assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {type(model.model.layers[0])}
    else:
        assert config.distributed_type == DistributedType.NO
