"""Commands that are killed at any moment: nothing stays of them, and the same command again gives the same.

A forked process is killed at its n-th change of the file system, for n over the whole run; the parent never writes.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
from pathlib import Path

import pytest
import torch
from forks import forked
from patches import lora
from tiny import logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.cli.app import app
from rope_patch.exporting import export


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, with the hash of what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A base, the same patched, and an adapter on it."""
    root = tmp_path_factory.mktemp("sources")
    tiny_model().save_pretrained(root / "base")
    tuned = lora(rope_patch.load(root / "base", "yarn:factor=4"))
    rope_patch.save(tuned, root / "adapter")
    return root


def commands(root: Path, out: Path):
    model = rope_patch.load(root / "base", "pi:factor=4")
    return {
        "apply": lambda: app(["apply", str(root / "base"), "yarn", "factor=4", "-o", str(out)]),
        "export": lambda: export(root / "base", out, to="vllm", method="yarn:factor=4"),
        "export an adapter": lambda: export(root / "adapter", out, to="sglang"),
        "save": lambda: rope_patch.save(model, out),
        "recipes copy": lambda: app(["recipes", "copy", str(out)]),
    }


CASES = [
    pytest.param(name, exists, every, marks=pytest.mark.full if every == 1 else (), id=f"{name}-{kind}-{every}")
    for every, names in ((1, ("apply", "export", "export an adapter", "save", "recipes copy")), (5, ("apply", "save")))
    for name in names
    for exists, kind in ((False, "new folder"), (True, "empty folder"))
]
"""Every moment of every command in ``make test-full``, one in five of the two shortest every day."""


@pytest.mark.parametrize(("name", "exists", "every"), CASES)
def test_killed_at_any_moment_it_leaves_nothing_and_runs_again(sources, tmp_path, name, exists, every):
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    call = commands(sources, out)[name]
    if exists:
        out.mkdir()
    assert forked(call) == 0
    expected = contents(place)
    assert all(path.startswith("out/") and "/." not in path for path in expected)
    killed = 0
    for stop in range(1, 1000, every):
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if exists:
            out.mkdir()
        status = forked(call, stop, place)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        assert forked(call) == 0, f"it does not run again after a kill at change {stop}"
        assert contents(place) == expected, f"something else is there after a kill at change {stop}"
    assert killed >= 15 // every
    print(f"{name}: {killed} kills, and every run again gave the same")


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("new", ["model", "adapter"])
def test_a_kill_over_another_checkpoint_mixes_nothing(sources, tmp_path, new, every):
    """What loads is the old one whole or the new one whole; in between it does not load."""
    out = tmp_path / "place" / "out"
    old = rope_patch.load(sources / "base", "yarn:factor=4").eval()
    if new == "model":
        with torch.no_grad():
            old.model.embed_tokens.weight.mul_(3)
    fresh = rope_patch.load(sources / "adapter" if new == "adapter" else sources / "base").eval()
    if new == "model":
        rope_patch.apply(fresh, "abf")
    before = lora(old, seed=5) if new == "adapter" else old
    either = [logits(before), logits(fresh)]
    outcomes = set()
    rope_patch.save(before, tmp_path / "before")
    for stop in range(1, 1000, every):
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
        shutil.copytree(tmp_path / "before", out)
        status = forked(lambda: rope_patch.save(fresh, out), stop, tmp_path / "place")
        try:
            output = logits(rope_patch.load(out).eval())
        except (OSError, ValueError):
            outcomes.add("none")
        else:
            outcomes.add(next((n for n, one in enumerate(either) if torch.equal(output, one)), "a mixture"))
        if new == "model" and (out / "config.json").exists() and (out / "model.safetensors").exists():
            plain = logits(AutoModelForCausalLM.from_pretrained(out).eval())  # a loader without our checks
            assert any(torch.equal(plain, one) for one in either)
        if status == 0:
            break
        assert forked(lambda: rope_patch.save(fresh, out)) == 0
        assert torch.equal(logits(rope_patch.load(out).eval()), either[1])
    assert stop > 10
    assert outcomes == {0, 1, "none"}
