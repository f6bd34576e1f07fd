"""Have SGLang's own Python build the rotary tables of checkpoint folders, without its kernels, which need a GPU.

``.venv/engines/sglang/bin/python sglang_tables.py sglang FOLDER`` reads ``FOLDER/jobs.json`` as ``engine_worker.py``
does, and writes ``FOLDER/answers.json``, and ``FOLDER/NAME.npz`` with cos and sin by layer type, (positions, 2 * pairs)
float32.

A decoder layer of SGLang's model class is built until it has called ``get_rope``: what is seen is what SGLang's code
passes to it, and returns. Replaced while a layer is built: layers that are neither of that model's file nor rotary, and
MLPs, by empty modules. Packages of images and kernels that are missing are imported as empty names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

Tables = dict[str, Tensor]
ABSENT = ("vllm", "torchvision", "torchaudio", "cv2", "sgl_kernel", "flashinfer", "torchcodec", "decord", "decord2")
ABSENT = tuple(name for name in ABSENT if importlib.util.find_spec(name) is None)


class Empty(nn.Module):
    """Stands for a layer that has nothing to do with rotary tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class AbsentModule(ModuleType):
    """Stands for a package that is missing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks modules for such names, and has to see that they are absent
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are missing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Built(Exception):
    """Ends the building of a layer that has its rotary module."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary


def stop_after(get_rope: Any, *args: Any, **kwargs: Any) -> None:
    """Call ``get_rope`` and end the building of the layer."""
    raise Built(get_rope(*args, **kwargs))


class OneProcess:
    """Stands for the group of parallel processes when there is one: sizes are 1, ranks are 0."""

    def __getattr__(self, name: str) -> int:
        return int(name.endswith("size"))


def tables_of(registry: Any, folder: str) -> tuple[Tables, int]:
    """Return the tables of a folder by layer type, "" if all layers share one, and the context that SGLang derives."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.utils.hf_transformers.common import get_context_length
    from sglang.srt.utils.hf_transformers_utils import get_config

    whole = get_config(folder, trust_remote_code=False, model_override_args={})
    context = int(get_context_length(whole.get_text_config()))  # now: building a layer changes the config
    model, _ = registry.resolve_model_cls(whole.architectures)
    with get_context().override_server_args():  # SGLang's own, for tests
        if whole.model_type == "gemma3_text":  # its model makes the tables itself
            return of_gemma3(sys.modules[model.__module__], whole), context
        return by_type(whole, model), context


def of_gemma3(module: ModuleType, config: Any) -> Tables:
    """Return what the rotary modules of Gemma 3 return."""
    with nothing_but_rotary(model_files(module)), mock.patch.object(module, "make_layers", lambda *_, **__: None):
        model = module.Gemma3TextModel(config)
    positions = torch.arange(config.max_position_embeddings)[None]
    tables = {}
    for kind, rotary in (("full_attention", model.rotary_emb), ("sliding_attention", model.rotary_emb_local)):
        tables[kind] = torch.cat([part[0].chunk(2, dim=-1)[0] for part in rotary(torch.zeros(1), positions)], dim=-1)
    return tables


def by_type(config: Any, model: type) -> Tables:
    """Return the tables that the decoder layers of a model look up."""
    home = next(cls for cls in model.__mro__ if decoder_layers(sys.modules[cls.__module__]))
    module = sys.modules[home.__module__]
    layer = decoder_layers(module)[0]
    accepted = inspect.signature(layer).parameters
    kinds = list(getattr(config, "layer_types", None) or [])
    chosen = {"": 0}
    if "full_attention" in (config.rope_parameters or {}) or config.model_type == "olmo3":
        chosen = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    tables: Tables = {}
    for kind, index in chosen.items():
        given = {"config": config, "quant_config": None, "layer_id": index, "prefix": f"model.layers.{index}"}
        with nothing_but_rotary(model_files(module)):
            try:
                layer(**{name: value for name, value in given.items() if name in accepted})
                raise LookupError(f"{layer.__name__} built no rotary embedding")
            except Built as built:
                tables[kind] = looked_up(built.rotary)
    return tables


def decoder_layers(module: ModuleType) -> list[type]:
    """Return the decoder layers that a module defines."""
    own = (cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__)
    return [cls for cls in own if cls.__name__.endswith(("DecoderLayer", "PhiLayer"))]


def model_files(module: ModuleType) -> list[ModuleType]:
    """Return the module of a model, and those of SGLang's models that it builds on."""
    package = module.__name__.rpartition(".")[0]
    names = {value.__module__ for value in vars(module).values() if isinstance(value, type)}
    return [sys.modules[name] for name in sorted(names | {module.__name__}) if name.startswith(package + ".")]


@contextlib.contextmanager
def nothing_but_rotary(files: list[ModuleType]) -> Iterator[None]:
    """Replace what has nothing to do with rotary tables, for the length of a ``with`` block."""
    own = {module.__name__ for module in files}
    parallel = {
        "get_tensor_model_parallel_world_size": 1,
        "get_tensor_model_parallel_rank": 0,
        "get_parallel": OneProcess(),
    }
    with contextlib.ExitStack() as stack:
        for module in files:
            for name, value in list(vars(module).items()):
                replacement: Any = None
                layer = isinstance(value, type) and issubclass(value, nn.Module)
                # Rotary modules and the model's own classes stay real: they decide which arguments reach get_rope.
                if layer and "otary" not in name and (value.__module__ not in own or name.endswith("MLP")):
                    replacement = Empty
                elif name == "get_rope":
                    replacement = functools.partial(stop_after, value)
                elif name in parallel:
                    replacement = functools.partial(parallel.get, name)
                if replacement is not None:
                    stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def looked_up(rotary: Any) -> Tensor:
    """Return the table of a rotary module; of longrope's two, the one for a prompt of the whole context."""
    both = getattr(rotary, "long_short_cos_sin_cache", None)
    if isinstance(both, Tensor):
        original = int(rotary.original_max_position_embeddings)  # positions of the table for short prompts, the first
        return both[original:] if int(rotary.max_position_embeddings) > original else both[:original]
    return rotary.cos_sin_cache


def main(folder: Path) -> None:
    """Do all jobs."""
    from transformers import AutoProcessor, CLIPVisionModel  # noqa: F401  they ask for torchvision in their own way

    sys.meta_path.append(Finder())
    from sglang.srt.models.registry import ModelRegistry

    answers: dict[str, Any] = {"versions": {"sglang": metadata.version("sglang")}}
    for job in json.loads((folder / "jobs.json").read_text()):
        try:
            tables, context = tables_of(ModelRegistry, job["path"])
            np.savez(folder / job["name"], **{kind or "all": table.float().numpy() for kind, table in tables.items()})
            answers[job["name"]] = {"context": context}
        except Exception as error:  # an engine may raise anything; its message is the result
            answers[job["name"]] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
