"""Several processes save one model: the first one writes, the others take part in gathering, and none hangs."""

import json

import pytest
import torch
import torch.distributed as dist
from support.forks import together
from support.patches import patched_model, read_json
from support.tiny import ids, logits

import rope_patch

pytestmark = pytest.mark.slow


def save_in_every_way(rank, root):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = patched_model("yarn", factor=4)
    rope_patch.save(model, root / "flag", is_main_process=rank == 0)  # accelerate's idiom
    rope_patch.save(model, root / "every")
    if rank == 0:
        rope_patch.save(model, root / "first")
    # The first process alone has the gathered weights, as accelerate and FSDP give them.
    state = model.state_dict() if rank == 0 else {}
    rope_patch.save(model, root / "gathered", is_main_process=rank == 0, state_dict=state)
    dist.barrier()
    folders = [root / name for name in ("flag", "every", "first", "gathered")]
    same = [torch.equal(logits(rope_patch.load(folder), ids()), logits(model)) for folder in folders]
    left = [path.name for path in root.iterdir() if path.name.startswith(".")]
    (root / f"{rank}.json").write_text(json.dumps([same, left]))


def test_every_way_of_saving_writes_a_whole_folder_once(tmp_path):
    together(lambda rank: save_in_every_way(rank, tmp_path), tmp_path)
    assert [read_json(tmp_path / f"{rank}.json") for rank in range(2)] == [[[True] * 4, []]] * 2
