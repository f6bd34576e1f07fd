"""``rope_patch.export`` and ``rope-patch export`` write a checkpoint as a folder or file that another engine reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rope_patch import checkpoints
from rope_patch.checkpoints.folder_patch import check_new_folder
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.engines.export_gguf import NEEDS_CONVERTER, export_gguf
from rope_patch.engines.folders import export_folder
from rope_patch.engines.programs import ENGINES
from rope_patch.methods import MethodLike
from rope_patch.options.shared import DTYPES
from rope_patch.patching.install import apply
from rope_patch.patching.locate import locate
from rope_patch.runtime import progress
from rope_patch.runtime.folders import is_gguf, scratch_folder
from rope_patch.runtime.gguf_file import check_output_file
from rope_patch.runtime.gguf_headers import cached_headers, gguf
from rope_patch.runtime.packaged import name_of

TARGETS = (*ENGINES, "gguf")


@dataclass(frozen=True)
class ExportRequest:
    """The request of an export. Its attributes are the arguments of :func:`export`; ``options`` are its last ones."""

    to: str
    method: MethodLike | None
    options: Mapping[str, Any]
    converter: str | Path | None
    dtype: str
    overwrite: bool

    def check(self, adapter: bool, gguf: bool = False) -> None:
        """Raise if options do not go together, or the converter is not there.

        Args:
            adapter: whether the source is an adapter.
            gguf: whether the source, or the base of the adapter, is a GGUF file.

        Raises:
            ValueError: options do not go together.
            FileNotFoundError: there is no converter at the given path.
        """
        if gguf and not adapter and self.to == "gguf":
            raise ValueError(
                "the model is a GGUF file already: `rope-patch apply FILE.gguf METHOD -o OUT.gguf` gives it another "
                "table and keeps its tensors; to='hf' writes it as a folder of transformers"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.to not in TARGETS:
            raise ValueError(f"unknown engine {self.to!r}. Known: {', '.join(TARGETS)}")
        if self.to == "gguf" and self.converter is None:
            raise ValueError(NEEDS_CONVERTER)
        if self.converter is not None and not Path(self.converter).is_file():
            raise FileNotFoundError(f"no file {self.converter}: converter is llama.cpp's convert_hf_to_gguf.py")
        if self.dtype != "auto" and self.to != "gguf" and not gguf and not adapter:
            raise ValueError("dtype is for merged weights and new GGUF files: here tensors are copied as they are")
        if self.method is not None and adapter:
            raise ValueError("an adapter fits the tables it was trained under: leave method out")
        given = [name for name, value in self.options.items() if value is not None]
        if given and self.method is None:
            raise ValueError(f"{given[0]} goes with a method: name one, or leave {given[0]} out")


def export(
    model: nn.Module | str | Path,
    output: str | Path,
    *,
    to: str,
    method: MethodLike | None = None,
    converter: str | Path | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Write a checkpoint so that another engine runs it with exactly the rotary tables that it has here.

    Weights of a folder or hub id are copied, not loaded. An adapter is merged into its base.

    Args:
        model: the model: a folder or hub id of a model, patched or not, or of an adapter; a GGUF file, whose weights
            are dequantized; or a model of transformers or PEFT in memory, which is saved on the way.
        output: the folder to write, or the file for GGUF; new or empty unless ``overwrite`` is given.
        to: the engine: ``"hf"`` (transformers 5 and 4), ``"vllm"``, ``"sglang"`` or ``"gguf"`` (llama.cpp).
        method: the method to apply on the way, for a model that has no patch.
        converter: the path of llama.cpp's own ``convert_hf_to_gguf.py``, which writes the weights; for ``to="gguf"``
            alone.
        dtype: the data type of merged weights (by default that of the base), of those read from a GGUF file (by default
            bfloat16), and of those of a new GGUF file (by default what the converter chooses).
        overwrite: whether to write into a folder that holds files.
        **options: further arguments of :func:`rope_patch.apply` for ``method``: ``target_length``, ``layer_types``,
            ``freeze_at``, or the method's own parameters.

    Returns:
        A summary of what was written, with the version of the engine in which such a table was seen to be read
        correctly. For folders ``export.json`` holds the same.

    Raises:
        ValueError: some options do not go together, or the engine cannot express a table or family, with the reason.
        OSError: the source cannot be read, weights are damaged, or ``output`` cannot be written.

    Example:
        >>> import tempfile, rope_patch
        >>> checkpoint = rope_patch.data_path("assets") / "llama"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = rope_patch.export(checkpoint, f"{folder}/out", to="vllm", method="p_rope:p=0.5")
        >>> written["engine"], [table["rope_type"] for table in written["tables"]]
        ('vLLM', ['longrope'])
    """
    output = Path(output)
    request = ExportRequest(to, method, options, converter, dtype, overwrite)
    if not isinstance(model, nn.Module):
        source = Path(model) if Path(model).exists() else model
        with cached_headers(source):
            return _export(source, output, request, name_of(str(source)))
    request.check(adapter=hasattr(model, "peft_config"))
    origin = str(getattr(getattr(model, "config", None), "name_or_path", ""))
    places = []
    name = type(model).__name__
    if origin:
        places.append(origin)
        name = name_of(origin)
    with scratch_folder(output.with_name(f"{output.name}.model")) as folder:
        _save(model, folder, places)
        return _export(folder, output, request, name)


def _export(source: str | Path, output: Path, request: ExportRequest, name: str) -> dict[str, Any]:
    """Export a folder, hub id or GGUF file; ``name`` is the name of the model that is written into a GGUF file."""
    adapter = checkpoints.is_adapter(source)
    base = checkpoints.adapter_base(source) if adapter else source
    request.check(adapter, gguf=is_gguf(base))
    for place in (source, base):
        if Path(place).resolve() == output.resolve():  # overwriting would delete what is being exported
            raise ValueError(f"{output} is the model itself or the base of the adapter: give another output folder")
    if request.to == "gguf":
        gguf()  # a missing package is reported now, not after the merge
        check_output_file(output, overwrite=request.overwrite)  # also before the merge, which takes long
    else:
        check_new_folder(base, output, request.overwrite)
        if request.dtype == "auto" and is_gguf(base):
            request = replace(request, dtype="bfloat16")
    with _model_and_weights(source, output, request) as (model, weights):
        if request.method is not None:
            apply(model, request.method, **request.options)
        if request.to != "gguf":
            return export_folder(
                model,
                weights,
                output,
                to=request.to,
                overwrite=request.overwrite,
                dtype=request.dtype,
            )
        return export_gguf(
            model,
            weights,
            output,
            converter=Path(str(request.converter)),
            name=name,
            dtype=request.dtype,
            overwrite=request.overwrite,
        )


def _save(model: nn.Module, folder: Path, places: Sequence[str | Path]) -> None:
    """Save a model that is in memory, patched or not, with the tokenizer of the first of some places that has one."""
    if locate(model).record is not None:
        checkpoints.save(model, folder)
    else:
        pretrained: Any = model
        pretrained.save_pretrained(folder)
    for place in places:
        with contextlib.suppress(ValueError, OSError):
            checkpoints.read_tokenizer(place).save_pretrained(folder)
            break


@contextlib.contextmanager
def _model_and_weights(
    source: str | Path, output: Path, request: ExportRequest
) -> Iterator[tuple[PreTrainedModel, str | Path]]:
    """Yield the model that is exported, without weights, and the folder, hub id or file of its weights.

    Of an adapter it is the base with the adapter merged into it.
    """
    if not checkpoints.is_adapter(source):
        yield model_without_weights(source), source
        return
    loaded: Any = checkpoints.load(source, dtype=request.dtype)
    progress.say("copying base and adapter, merged")
    merged = loaded.merge_and_unload()
    with scratch_folder(output) as folder:
        _save(merged, folder, [source, checkpoints.adapter_base(source)])
        # The folder holds the merged model now: its memory is given back before the export.
        del loaded, merged
        yield model_without_weights(folder), folder
