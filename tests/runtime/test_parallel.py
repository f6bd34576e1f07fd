"""Which device a process takes."""

import pytest
import torch

from rope_patch.runtime.parallel import choose_device


def machine(monkeypatch, kind, count=8):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    gpu = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_auto_and_the_kind_of_the_gpu_are_the_gpu_of_this_process(monkeypatch, kind):
    machine(monkeypatch, kind)
    assert choose_device() == choose_device(kind) == f"{kind}:0"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == choose_device(kind) == f"{kind}:3"
    for device in (f"{kind}:1", "cpu", "balanced"):
        assert choose_device(device) == device


def test_processes_share_the_one_gpu_of_a_machine(monkeypatch):
    machine(monkeypatch, "mps", count=1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device() == "mps:0"


def test_without_a_gpu_auto_is_the_cpu_and_what_is_named_stays(monkeypatch):
    machine(monkeypatch, None, count=0)
    assert (choose_device(), choose_device("cuda")) == ("cpu", "cuda")
