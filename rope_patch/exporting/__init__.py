"""Export checkpoints to other engines: folders for transformers, vLLM and SGLang, files for llama.cpp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rope_patch import checkpoints
from rope_patch.checkpoints.offline import check_free, skeleton
from rope_patch.exporting.engines import ENGINES, UNVERIFIED
from rope_patch.exporting.folders import export_folder, read_tables
from rope_patch.exporting.lora import check_adapter, copy_adapter
from rope_patch.files import scratch_folder
from rope_patch.methods import MethodLike
from rope_patch.packaged import name_of
from rope_patch.patching.apply import apply, reapply
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.verify import inspect_model

TARGETS = (*ENGINES, "gguf")
FORMS = ("table", "partial")
TYPES = ("auto", "float32", "bfloat16", "float16")


def export(
    source: str | Path,
    out: str | Path,
    *,
    to: str,
    form: str = "table",
    method: MethodLike | None = None,
    base: str | Path | None = None,
    dtype: str = "auto",
    lora: bool = False,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> dict[str, Any]:
    """Write a checkpoint so that another engine runs it with the very tables it has here.

    Weights are copied, never loaded, where the source is a model; an adapter is merged into its base first, or with
    ``lora`` stands beside the base, which is patched as the adapter's record says: the engine loads the base's tables,
    and the adapter fits no others. So the order is: patch the base, export the base, serve it with the adapter.

    Args:
        source: folder or hub id: a model, patched or not, or an adapter.
        out: folder to write (for GGUF, the file); new or empty unless ``overwrite``.
        to: ``"hf"``, ``"vllm"``, ``"sglang"`` or ``"gguf"``.
        form: ``"table"``, or ``"partial"`` for p-RoPE on families that rotate a part of each head.
        method: a patch to apply on the way, for a model that has none.
        base: for GGUF, a file of the base model to take the tensors from.
        dtype: of merged weights, and of those of a GGUF file written without ``base``.
        lora: keep an adapter an adapter.
        overwrite: write into a folder that holds files.
        progress: told the name of each file before it is copied.
        **options: of :func:`rope_patch.apply` for ``method``: ``target_length``, ``layer_types``, ``freeze_at``, or
            the method's own parameters.

    Returns:
        What was written, and in which version of the engine it was seen to be read so; ``export.json`` says the same.

    Raises:
        ValueError: bad options, or a table, family or adapter that the engine cannot express, with the reason.
        OSError: unreadable source, damaged weights, unwritable ``out``.
    """
    source, out = Path(source) if Path(source).exists() else source, Path(out)
    adapter = checkpoints.is_adapter(source)
    _check_options(to, form, method, options, base, dtype, lora, adapter)
    if to == "gguf":
        from rope_patch.checkpoints.gguf_file import check_out

        check_out(out, overwrite=overwrite)  # before an adapter is merged, which takes long
    if to == "gguf" and lora:
        from rope_patch.exporting import gguf

        gguf.export_gguf_lora(source, out, overwrite=overwrite, progress=progress)
        return _said_of_gguf(["load it beside the GGUF of the patched base: it fits no other tables"])
    if to != "gguf":
        check_free(out, overwrite)
    for place in (source, checkpoints.adapter_base(source)) if adapter else ():
        if Path(place).resolve() == out.resolve():  # overwriting would delete what is being exported
            raise ValueError(f"{out} is the adapter itself or its base: give another output folder")
    merging = _as_model(source, out, lora, dtype, progress)
    with merging if adapter else contextlib.nullcontext((skeleton(source), source)) as (model, weights):
        if method is not None:
            apply(model, method, **options)
        if to == "gguf":
            from rope_patch.exporting import gguf

            gguf.export_gguf(
                model,
                out,
                base=base,
                weights=weights,
                name=name_of(str(source)),
                dtype="float16" if dtype == "auto" else dtype,
                overwrite=overwrite,
                progress=progress,
            )
            plain = all(slot.is_geometric for slot in inspect_model(model).tables)
            lost = (
                f"transformers' own reader (gguf_file=) takes its base alone: rope_patch.load({str(out)!r}) reads all"
            )
            return _said_of_gguf([] if plain else [lost])
        return _folder(model, weights, source, out, to, form, adapter and lora, overwrite, progress)


def _check_options(
    to: str,
    form: str,
    method: MethodLike | None,
    options: Mapping[str, Any],
    base: str | Path | None,
    dtype: str,
    lora: bool,
    adapter: bool,
) -> None:
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(TYPES)}, got {dtype!r}")
    if to not in TARGETS:
        raise ValueError(f"unknown engine {to!r}. Known: {', '.join(TARGETS)}")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if form == "partial" and (to == "gguf" or lora):
        raise ValueError("form 'partial' moves rows of the weights: it is for folders of whole or merged models")
    if base is not None and to != "gguf":
        raise ValueError("a base GGUF file is for to='gguf'")
    if base is not None and adapter:
        raise ValueError(
            "tensors of a base GGUF file are copied as they are, and the adapter would be lost: leave the file out to "
            "write the merged model, or patch the base's GGUF with the adapter's method and keep the adapter (lora) "
            "beside it"
        )
    if dtype != "auto" and (lora or base is not None or (to != "gguf" and not adapter)):
        raise ValueError("dtype is for merged weights and new GGUF files: here tensors are copied as they are")
    if lora and not adapter:
        raise ValueError("lora is for adapters: the source holds none")
    if lora and to == "hf":
        raise ValueError("transformers takes the adapter as it is, with rope_patch.load; leave lora out to merge it")
    if method is not None and adapter:
        raise ValueError("an adapter fits the tables it was trained under: leave method out")
    given = [name for name, value in options.items() if value is not None]
    if given and method is None:
        raise ValueError(f"{given[0]} goes with a method: name one, or leave {given[0]} out")


@contextlib.contextmanager
def _as_model(
    source: str | Path, out: Path, lora: bool, dtype: str, progress: Callable[[str], None]
) -> Iterator[tuple[PreTrainedModel, str | Path]]:
    """Give the skeleton and the weights of the model an adapter needs: its base patched, or the two merged."""
    base, record = checkpoints.adapter_base(source), checkpoints.read_record(source)
    if lora:
        model = skeleton(base)
        if record is not None:
            reapply(model, record)
        yield model, base
        return
    import torch

    loaded: Any = checkpoints.load(source, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    progress("base and adapter, merged")
    merged = loaded.merge_and_unload()
    with scratch_folder(out) as folder:
        if find_rotary(merged).record is not None:
            checkpoints.save(merged, folder)
        else:
            merged.save_pretrained(folder)
        del loaded, merged
        for place in (source, base):
            with contextlib.suppress(ValueError):
                checkpoints.read_tokenizer(place).save_pretrained(folder)
                break
        yield skeleton(folder), folder


def _folder(
    model: PreTrainedModel,
    weights: str | Path,
    source: str | Path,
    out: Path,
    to: str,
    form: str,
    lora: bool,
    overwrite: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    notes: list[str] = []
    finish: Callable[[Path], None] = lambda _: None  # noqa: E731
    if form == "partial":
        from rope_patch.exporting.partial import as_partial, permute_folder

        slots, layers = read_tables(model), int(model.config.num_hidden_layers)
        model, layout, touched = as_partial(model, slots)
        notes = ["p-RoPE as partial rotary: rows of queries and keys moved, equal up to float32 rounding"]

        def finish(folder: Path) -> None:
            permute_folder(folder, layout, touched * layers)

    elif lora:
        check_adapter(source, to)
        notes = [f"serve with the adapter in {out.name}/adapter; it fits no other tables"]
        if to != "vllm":
            notes.append(f"adapters beside a base are {UNVERIFIED} on {ENGINES[to].name}")

        def finish(folder: Path) -> None:
            copy_adapter(source, folder / "adapter")

    return export_folder(model, weights, out, to=to, overwrite=overwrite, progress=progress, finish=finish, notes=notes)


def _said_of_gguf(notes: list[str]) -> dict[str, Any]:
    from rope_patch.checkpoints.gguf_table import CHECKED

    return {"engine": "llama.cpp", "checked_against": CHECKED, "shown_by": "make test-engines", "notes": notes}
