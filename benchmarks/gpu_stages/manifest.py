"""What the stages need beside torch, transformers, peft and accelerate, and what of it is missing on this machine.

This is the one place that says so: ``gpu.py --list`` prints it, a cell that lacks something is skipped with the reason,
and ``gpu.py --pack`` collects what can be found.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gpu_stages.base import Setting
from public_checkpoint import SMOLLM2, sha256

PART_BYTES = 50_000_000
"""The largest part of a weight file that is packed [bytes]."""
HELD_OUT = ("moby_dick.txt", "pride_and_prejudice.txt", "sherlock_holmes.txt")
"""Novels that the study of SmolLM2 holds out."""


@dataclass(frozen=True)
class Need:
    """Something that is brought along.

    Attributes:
        name: that cells give.
        kind: ``wheel``, ``weights``, ``text`` or ``device``.
        what: it is.
        missing: returns why it cannot be used here; None where it can.
    """

    name: str
    kind: str
    what: str
    missing: Callable[[Setting], str | None]


def wheel(name: str, module: str, what: str) -> Need:
    """Return a package as a need."""

    def missing(_: Setting) -> str | None:
        return None if importlib.util.find_spec(module) else f"{name} is not installed"

    return Need(name, "wheel", what, missing)


def _no_gpu(setting: Setting) -> str | None:
    return None if setting.device == "cuda" else "it runs on a GPU only"


def _no_text(setting: Setting) -> str | None:
    return None if setting.text else "no text is given: --text FILE"


def _no_novels(setting: Setting) -> str | None:
    if setting.tiny:
        return _no_text(setting)
    names = {path.name for path in setting.text}
    lacking = sorted(set(HELD_OUT) - names)
    if lacking:
        return f"--text lacks {', '.join(lacking)}, which are held out"
    return None if names - set(HELD_OUT) else "--text has no novel to train on beside those that are held out"


def _no_weights(setting: Setting) -> str | None:
    if setting.tiny or (setting.carried / SMOLLM2.model / "config.json").is_file():
        return None
    packed = parts(setting.carried)
    if not (setting.carried / SMOLLM2.gguf).is_file() and (not packed or len(packed) < packed[0].count):
        held = f"{len(packed)} of {packed[0].count} parts of" if packed else "no"
        return f"{setting.carried} holds {held} {SMOLLM2.gguf}: --pack writes its parts"
    return None if importlib.util.find_spec("gguf") else "gguf is not installed, which reads the packed weights"


NEEDS = {
    need.name: need
    for need in (
        wheel("flash-attn", "flash_attn", "attention kernels; a build for the torch and CUDA of the machine"),
        wheel("bitsandbytes", "bitsandbytes", "NF4 weights"),
        wheel("liger-kernel", "liger_kernel", "fused norms and MLPs in Triton"),
        wheel("lm-eval", "lm_eval", "the harness that ours is held against"),
        wheel("gguf", "gguf", "reads the packed weights"),
        wheel("omegaconf", "omegaconf", "options of the fine-tuning recipe"),
        wheel("datasets", "datasets", "rows of the fine-tuning recipe"),
        Need("GPU", "device", "a CUDA device", _no_gpu),
        Need("text", "text", "any English text, a megabyte or more; --text", _no_text),
        Need("novels", "text", f"{', '.join(HELD_OUT)} and at least one more novel; --text", _no_novels),
        Need("smollm2", "weights", f"{SMOLLM2.model}: a folder, {SMOLLM2.gguf}, or its packed parts", _no_weights),
    )
}


def lacking(names: Iterable[str], setting: Setting) -> list[str]:
    """Return why each of these needs that is missing here cannot be used."""
    reasons = (NEEDS[name].missing(setting) for name in names)
    return [reason for reason in reasons if reason is not None]


# --- packages


def requirements(name: str) -> set[str]:
    """Return the names of a package and of all it needs, without extras, as far as they are installed here."""
    names: set[str] = set()
    queue = [name]
    while queue:
        current = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if current in names:
            continue
        try:
            needed = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            continue
        names.add(current)
        queue += [re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0] for line in needed if "extra ==" not in line]
    return names


def wheels(names: Iterable[str]) -> list[str]:
    """Return ``NAME==VERSION`` of the packages to bring for these needs, beside those that every stage has."""
    base = set().union(*map(requirements, ("rope_patch", "torch", "transformers", "peft", "accelerate")))
    asked = set().union(*map(requirements, names)) - base
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in sorted(asked)]


# --- weights in parts


@dataclass(frozen=True)
class Part:
    """A piece of a file; its name says which, and the digest of the whole."""

    path: Path
    number: int
    count: int


def parts(folder: Path, name: str = SMOLLM2.gguf) -> list[Part]:
    """Return the parts of a file that a folder holds, in order."""
    found = []
    for path in sorted(folder.glob(f"{name}.*-of-*")):
        number, count = (int(text) for text in path.name.removeprefix(f"{name}.").split("-of-"))
        found.append(Part(path, number, count))
    return sorted(found, key=lambda part: part.number)


def split(source: Path, folder: Path, size: int = PART_BYTES) -> list[Path]:
    """Write a file in parts of at most ``size`` bytes; returns them."""
    count = max(1, -(-source.stat().st_size // size))
    written = []
    with source.open("rb") as file:
        for number in range(1, count + 1):
            path = folder / f"{source.name}.{number}-of-{count}"
            path.write_bytes(file.read(size))
            written.append(path)
    return written


def join(folder: Path, name: str = SMOLLM2.gguf, digest: str = SMOLLM2.gguf_sha256) -> Path:
    """Put the parts of a file together, unless it is there; returns it.

    Raises:
        ValueError: a part is missing, or the whole is another file.
    """
    whole = folder / name
    if whole.is_file():
        return whole
    found = parts(folder, name)
    if not found or [part.number for part in found] != list(range(1, found[0].count + 1)):
        raise ValueError(f"{folder} holds parts {[part.number for part in found]} of {name}: bring all of them")
    joined = b"".join(part.path.read_bytes() for part in found)
    if hashlib.sha256(joined).hexdigest() != digest:
        raise ValueError(f"the parts of {name} in {folder} are of another file: pack it again")
    scratch = folder / f"{name}.joining"
    scratch.write_bytes(joined)
    os.replace(scratch, whole)
    return whole


def pack(folder: Path, setting: Setting, weights: Path | None) -> list[str]:
    """Copy what is here into a folder, weights in parts; returns a line for each thing, what is missing too."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for path in setting.text:
        (folder / "text").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / "text" / path.name)
        lines.append(f"{path.stat().st_size / 1e6:7.1f} MB  text/{path.name}")
    source = weights if weights is not None else setting.carried / SMOLLM2.gguf
    if source.is_file() and sha256(source) == SMOLLM2.gguf_sha256:
        lines += [f"{part.stat().st_size / 1e6:7.1f} MB  {part.name}" for part in split(source, folder)]
    else:
        lines.append(f"missing:    {SMOLLM2.gguf}, which `make smollm2` puts into build/smollm2: give --weights PATH")
    lines += [f"missing:    {reason}" for reason in lacking(("novels",), setting)]
    return lines


def download_command(names: Sequence[str], python: str = "3.12") -> str:
    """Return the command that downloads wheels for a machine without a network."""
    platforms = " ".join(f"--platform manylinux{name}_x86_64" for name in ("_2_28", "_2_24", "_2_17", "2014"))
    return (
        f"python -m pip download --no-deps --only-binary=:all: --python-version {python} {platforms} -d wheels "
        + " ".join(wheels(names))
    )
