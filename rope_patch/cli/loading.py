"""What commands that run a model share: device, data type, tokenizer, model and progress."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TYPES = ("auto", "float32", "bfloat16", "float16")
BALANCED = "balanced"
"""The device that stands for all GPUs, among which accelerate divides the layers."""


def prepare(threads: int | None) -> None:
    """Set the number of CPU threads, and leave progress bars to this package."""
    import torch
    from transformers.utils import logging as hf_logging

    if threads is not None:
        torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()


def check_dtype(dtype: str) -> None:
    """Raise unless a word names a data type.

    Raises:
        ValueError: an unknown word.
    """
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(TYPES)}, got {dtype!r}")


def check_device(device: str) -> None:
    """Raise unless a model can be put on a device of this machine.

    Args:
        device: as torch names them, ``"auto"`` or ``"balanced"``.

    Raises:
        ValueError: an unknown device, or one that is not there.
        ImportError: ``"balanced"`` without accelerate.
    """
    import importlib.util

    import torch

    if device == "auto":
        return
    if device == BALANCED:
        if not torch.cuda.is_available():
            raise ValueError("no device 'balanced': torch sees no GPU to spread a model over")
        if importlib.util.find_spec("accelerate") is None:
            raise ImportError("device 'balanced' spreads a model with accelerate: pip install accelerate")
        return
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device must be auto, cpu, cuda, cuda:1, balanced or another of torch's, got {device!r}"
        ) from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= count:
        gpus = f"has {count} GPU{'s' * (count > 1)}, counted from 0" if count else "sees no GPU"
        raise ValueError(f"no device {device!r}: torch {gpus}")
    try:
        float(torch.ones((), device=place))  # which a device without numbers, such as meta, cannot give
    except Exception as error:  # of many kinds: a backend says in its own way that it is not there
        reason = str(error).partition("\n")[0]
        raise ValueError(f"no device {device!r} to compute on: {reason}") from None


def choose_device(device: str) -> str:
    """Return a device for torch: ``"auto"`` is the GPU of this process where there is one, and the CPU elsewhere."""
    import torch

    if device != "auto":
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def check_paths(*paths: str | Path | None) -> None:
    """Raise where a text is not there; words such as ``"builtin"`` are none.

    Raises:
        FileNotFoundError: no such file or folder.
    """
    for path in paths:
        if isinstance(path, Path) and not path.exists():
            raise FileNotFoundError(f"no file or folder {str(path)!r}")


def read_haystack(haystack: str) -> str | Path:
    """Return the name of a haystack that ships with the package, or the path of another.

    Raises:
        FileNotFoundError: no such file or folder.
    """
    chosen = haystack if haystack in ("builtin", "noise") else Path(haystack)
    check_paths(chosen)
    return chosen


def read_methods(methods: Sequence[str]) -> list[Any]:
    """Return the methods of a list of method strings.

    Raises:
        ValueError: an unknown method, a bad parameter, or none at all.
    """
    from rope_patch.methods import as_method

    if not methods:
        raise ValueError("give at least one method and one length")
    return [as_method(name) for name in methods]


def check_patch(method: str | None, options: Mapping[str, Any]) -> None:
    """Raise where a method is unknown, or options of a patch are given without one.

    Raises:
        ValueError: a bad method, or an option that no method goes with.
    """
    from rope_patch.methods import as_method

    given = [name for name, value in options.items() if value is not None]
    if method is not None:
        as_method(method)
    elif given:
        raise ValueError(f"{given[0]} goes with a method: name one, or leave {given[0]} out")


def load_tokenizer(source: str) -> Any:
    """Return a checkpoint's tokenizer, or that of an adapter's base where it has none of its own.

    Args:
        source: folder or hub id.

    Raises:
        FileNotFoundError: the hub has no such repository.
        ValueError: no such folder, one without a checkpoint, or no tokenizer that can be loaded.
    """
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter
    from rope_patch.checkpoints.reading import read_tokenizer
    from rope_patch.files import check_source

    check_source(source)
    bare = is_adapter(source) and not (Path(source) / "tokenizer_config.json").exists()
    try:
        return read_tokenizer(adapter_base(source) if bare else source)
    except ValueError as error:
        if Path(source).exists():
            raise
        reason = str(error.__cause__).partition("\n")[0]
        raise FileNotFoundError(f"no folder {source}, and the hub gives no tokenizer of that name: {reason}") from None


def load_model(
    source: str, method: str | None = None, device: str = "auto", dtype: str = "auto", **apply_options: Any
) -> Any:
    """Load a checkpoint, or an adapter over its base, with its patch in place.

    Args:
        source: folder or hub id, or a GGUF file, of which the type of its weights is printed.
        method: patch to apply, as a method string.
        device: as :func:`check_device` takes it.
        dtype: one of ``TYPES``.
        **apply_options: of :func:`rope_patch.apply`, for ``method``.

    Raises:
        ValueError: an unknown method, no such folder, or one without a checkpoint.
        OSError: nothing that can be loaded, or no such repository.
    """
    import torch

    from rope_patch.checkpoints.gguf import weights_in_file
    from rope_patch.checkpoints.save_load import load

    spread: dict[str, Any] = {"device_map": BALANCED} if device == BALANCED else {}
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    loaded: Any = load(source, method, dtype=kind, **apply_options, **spread)
    for said in weights_in_file(loaded).values():
        print(f"{source}: the weights are {said}", file=sys.stderr)
    if not spread:
        place = torch.device(choose_device(device))
        if any(not _lies_on(parameter.device, place) for parameter in loaded.parameters()):
            loaded = loaded.to(place)  # which quantized weights refuse: they are on the GPU already
    return loaded.eval()


def _lies_on(device: Any, place: Any) -> bool:
    return bool(device.type == place.type and (place.index is None or device.index in (None, place.index)))


def speed_of(model: Any, length: int) -> Callable[[], float]:
    """Return a function that measures once how fast a model reads texts of a length [tokens/s]."""
    from rope_patch.modeling.budget import tokens_per_second

    return functools.cache(lambda: tokens_per_second(model, length))


def tokens_within(model: Any, budget: int | None, speed: Callable[[], float], finished: Path) -> int:
    """Return how many tokens a model can read in a time, or by default as many as its size allows.

    Args:
        model: that reads.
        budget: the time; None for the default [s].
        speed: of the model, from :func:`speed_of`.
        finished: file of the result cache, which keeps the answer: a command that goes on reads the same texts.
    """
    from rope_patch.evaluation.result_cache import ResultCache, key
    from rope_patch.modeling.budget import SAFETY, default_tokens
    from rope_patch.modeling.scoring import fingerprint

    if budget is None:
        return default_tokens(model)
    cache, name = ResultCache(finished), key(what="budget", seconds=budget, model=fingerprint(model))
    if name not in cache:
        cache[name] = int(SAFETY * budget * speed())
    return int(cache[name])


def say_estimate(tokens: int, speed: Callable[[], float], *, hidden: bool = False) -> None:
    """Print how many tokens a command will read at most, and how long that takes at least.

    Args:
        tokens: to be read [tokens].
        speed: of the model, from :func:`speed_of`.
        hidden: print and measure nothing.
    """
    from rope_patch.modeling.budget import duration_text

    if hidden:
        return
    print(
        f"reads up to {tokens:,} tokens: {duration_text(tokens / speed())} at {speed():,.0f} tokens a second, or up to "
        "twice as long where texts are longer than 2k or heads and caches are measured; --budget 10m reads less",
        file=sys.stderr,
    )


def suite_within(
    suite: Any,
    model: Any,
    budget: int | None,
    speed: Callable[[], float],
    readings: int,
    finished: Path,
    chosen: Collection[str] = (),
) -> Any:
    """Return a suite whose readings fit into a time, or by default into what the size of a model allows, if any does.

    What was chosen on the command line stays as it is where no time is given. What a smaller spec costs is printed.

    Args:
        suite: of what is measured.
        model: that reads it.
        budget: time for all readings; None for the default [s].
        speed: of the model, from :func:`speed_of`.
        readings: how many times the suite is read.
        finished: as for :func:`tokens_within`.
        chosen: fields of the spec that the user chose.

    Raises:
        ValueError: even the smallest spec does not fit into the time.
    """
    from dataclasses import replace

    from rope_patch.evaluation.spec import SCALABLE
    from rope_patch.evaluation.suite import EvalSuite

    whole = replace(suite.spec, windows=len(suite.windows))  # as many as the text has room for
    scalable = [name for name in SCALABLE if budget is not None or name not in chosen]
    tokens = tokens_within(model, budget, speed, finished) / readings
    if budget is None:
        tokens = max(tokens, whole.smallest(scalable).tokens_to_read())
    smaller = whole.within(tokens, scalable)
    if smaller == whole:
        return suite
    print(f"{'--budget' if budget else 'for a model of this size'}: {whole.cost_of(smaller)}", file=sys.stderr)
    return EvalSuite(smaller, suite.tokenizer)


@contextlib.contextmanager
def progress_bar(
    total: int | None, label: str | None = None, *, hidden: bool = False
) -> Iterator[tuple[Any, Callable[[str, int], None]]]:
    """Show a progress bar of tokens.

    Args:
        total: tokens to read, where they are known.
        label: in front of the bar.
        hidden: show nothing.

    Yields:
        The bar, and a function that takes the stage of the work and the tokens that were just read.
    """
    from tqdm import tqdm

    with tqdm(total=total, unit="tok", unit_scale=True, desc=label, disable=hidden) as bar:

        def on_progress(stage: str, tokens: int) -> None:
            bar.set_postfix_str(stage, refresh=False)
            bar.update(tokens)

        yield bar, on_progress


def say_copied(name: str) -> None:
    """Print the name of a file that is copied."""
    print(f"copying {name}", file=sys.stderr)


@contextlib.contextmanager
def bytes_copied(output: Path, *, hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of a file that is written.

    Args:
        output: the file, for the label.
        hidden: show nothing.

    Yields:
        A function that takes the bytes that are written so far, and those of all.
    """
    from tqdm import tqdm

    with contextlib.ExitStack() as shown:
        bars: list[Any] = []

        def on_bytes(written: int, total: int) -> None:
            if not bars:  # what is refused before anything is written shows no bar
                looks: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
                bars.append(
                    shown.enter_context(tqdm(total=total, desc=f"writing {output.name}", disable=hidden, **looks))
                )
            bars[0].update(written - bars[0].n)

        yield on_bytes
