"""Have vLLM's and SGLang's own Python build the rotary tables of a checkpoint folder, without their kernels.

A folder's config goes through the engine's own config loader, and a decoder layer of the engine's own model class is
built from it until that has called the engine's ``get_rope``: so what is seen is what the engine's code passes to it,
and what it returns (SGLang's Gemma 3 makes its tables itself; there they are what its rotary modules return). Nothing
of an engine's rotary code is replaced or written again here. What is replaced while a layer is built: layers that are
neither of that model's file nor rotary (linear layers, norms, attention) and MLPs, by empty modules, and the size of
the tensor-parallel group, by 1. Where image packages and kernels are missing, SGLang imports empty names in their
place. Weights are never loaded, and the kernels that would apply a table never run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from torch import Tensor, nn

ENGINES = ("vllm", "sglang")
Tables = dict[str | None, Tensor]
"""Tables by layer type, or under None if all layers share one: (positions, 2 * pairs) float32, cos of every pair, then
sin."""


def version(engine: str) -> str | None:
    """Return the version of an engine whose Python can be imported here, or None."""
    try:
        importlib.import_module(f"{engine}.srt.layers.rotary_embedding" if engine == "sglang" else engine)
        if engine == "vllm":
            importlib.import_module("vllm.model_executor.layers.rotary_embedding")
        return metadata.version(engine)
    except (ImportError, metadata.PackageNotFoundError):
        return None


def tables(engine: str, folder: str | Path, positions: int, overrides: dict[str, Any] | None = None) -> Tables:
    """Return the tables that an engine's own code builds for a folder.

    Args:
        engine: one of ``ENGINES``.
        folder: a checkpoint folder, of which only the config is read.
        positions: the number of positions that are returned [tokens].
        overrides: the values that ``--hf-overrides`` or ``--json-model-override-args`` would give.

    Raises:
        Exception: any error that the engine raises for this config, or ``IndexError`` if its table has fewer positions.
    """
    tables_by_kind = (_vllm if engine == "vllm" else _sglang)(str(folder), overrides or {})
    for kind, table in tables_by_kind.items():
        if len(table) < positions:
            raise IndexError(f"{engine} holds {len(table)} positions for {kind or 'all layers'}, asked for {positions}")
    return {kind: table[:positions].float() for kind, table in tables_by_kind.items()}


# --- vLLM


def longest(folder: str | Path) -> int:
    """Return the context that vLLM derives from a folder's config [tokens]."""
    return int(_vllm_config(str(folder)).max_model_len)


def longest_of_sglang(folder: str | Path) -> int:
    """Return the context that SGLang derives from a folder's config [tokens]."""
    _sglang_registry()
    from sglang.srt.utils.hf_transformers.common import get_context_length
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(str(folder), trust_remote_code=False, model_override_args={})
    return int(get_context_length(config.get_text_config()))


def _vllm_config(folder: str, overrides: dict[str, Any] | None = None) -> Any:
    from vllm.config import ModelConfig

    return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", hf_overrides=overrides or {})


def _vllm(folder: str, overrides: dict[str, Any]) -> Tables:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models import ModelRegistry

    settings = _vllm_config(folder, overrides)
    model, _ = ModelRegistry.resolve_model_cls(settings.architectures, settings)
    config = settings.hf_text_config
    whole = VllmConfig(device_config=DeviceConfig(device="cpu"))
    whole.model_config = settings
    given = {"config": config, "vllm_config": whole, "cache_config": None, "quant_config": None}
    with set_current_vllm_config(whole):
        return _by_type(config, model, given)


# --- SGLang

STOOD_IN = ("torchvision", "torchaudio", "cv2", "sgl_kernel", "flashinfer", "torchcodec", "decord", "decord2")
"""Packages of image code and kernels that SGLang imports on the way to its models. If one is missing, its names are
replaced by empty ones."""


class _StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        # Python asks modules for such names, and has to see that they are absent.
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.missing else None
        )

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def __init__(self) -> None:
        self.missing = {name for name in STOOD_IN if importlib.util.find_spec(name) is None}


@contextlib.contextmanager
def _stood_in() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@functools.cache
def _sglang_registry() -> Any:
    import transformers.image_utils  # noqa: F401  it asks for torchvision in its own way

    with _stood_in():
        from sglang.srt.models.registry import ModelRegistry

        return ModelRegistry


def _sglang(folder: str, overrides: dict[str, Any]) -> Tables:
    registry = _sglang_registry()
    from sglang.srt.runtime_context import get_context
    from sglang.srt.utils.hf_transformers_utils import get_config

    whole = get_config(folder, trust_remote_code=False, model_override_args=overrides)
    model, _ = registry.resolve_model_cls(whole.architectures)
    config = whole.get_text_config()
    with get_context().override_server_args():  # SGLang's own, for tests
        # Its model holds the tables and passes them to the layers, so no layer calls get_rope.
        if config.model_type == "gemma3_text":
            return _gemma3(sys.modules[model.__module__], config)
        return _by_type(config, model, {"config": config, "quant_config": None})


def _gemma3(module: ModuleType, config: Any) -> Tables:
    with _nothing_but_rotary(_model_files(module)), mock.patch.object(module, "make_layers", lambda *_, **__: None):
        model = module.Gemma3TextModel(config)
    positions = torch.arange(config.max_position_embeddings)[None]
    tables_by_kind: Tables = {}
    for kind, rotary in (("full_attention", model.rotary_emb), ("sliding_attention", model.rotary_emb_local)):
        cos, sin = (part[0].chunk(2, dim=-1)[0] for part in rotary(torch.zeros(1), positions))
        tables_by_kind[kind] = torch.cat((cos, sin), dim=-1)
    return tables_by_kind


# --- both

_LAYER = ("DecoderLayer", "PhiLayer")
_PARALLEL: dict[str, Any] = {
    "get_tensor_model_parallel_world_size": lambda: 1,
    "get_tensor_model_parallel_rank": lambda: 0,
    "get_parallel": lambda: _OneProcess(),
}


class _OneProcess:
    """Stands for the group of parallel processes when there is one: sizes are 1, ranks are 0."""

    def __getattr__(self, name: str) -> int:
        return int(name.endswith("size"))


class _Empty(nn.Module):
    """Stands for a layer that has nothing to do with rotary tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _by_type(config: Any, model: type, given: dict[str, Any]) -> Tables:
    module = sys.modules[_home(model).__module__]
    layer = _decoder_layer(module)
    kinds = list(getattr(config, "layer_types", None) or [])
    nested = "full_attention" in (config.rope_parameters or {}) or config.model_type == "olmo3"
    chosen = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)} if nested else {None: 0}
    tables_by_kind: Tables = {}
    for kind, index in chosen.items():
        place = {"prefix": f"model.layers.{index}", "layer_id": index, "layer_idx": index}
        accepted = inspect.signature(layer).parameters
        arguments = {name: value for name, value in (given | place).items() if name in accepted}
        with _nothing_but_rotary(_model_files(module)):
            try:
                layer(**arguments)
                # Reached only if the layer was built to its end: get_rope would have stopped it.
                raise LookupError(f"{layer.__name__} built no rotary embedding")
            except _Built as built:
                tables_by_kind[kind] = _cache(built.rotary)
    return tables_by_kind


def _home(model: type) -> type:
    """Return the class whose file holds the decoder layer: it may be a base class, as Llama is of Phi3."""
    for cls in model.__mro__:
        with contextlib.suppress(LookupError):
            _decoder_layer(sys.modules[cls.__module__])
            return cls
    raise LookupError(f"no decoder layer beside {model}")


def _decoder_layer(module: ModuleType) -> type:
    own = [c for n, c in vars(module).items() if n.endswith(_LAYER) and c.__module__ == module.__name__]
    if not own:
        raise LookupError(module.__name__)
    return own[0]


def _model_files(module: ModuleType) -> list[ModuleType]:
    """Return the module of a model, and the modules of the same engine that it builds on."""
    package = module.__name__.rpartition(".")[0]
    names = {value.__module__ for value in vars(module).values() if isinstance(value, type)}
    return [sys.modules[name] for name in sorted(names | {module.__name__}) if name.startswith(package + ".")]


@contextlib.contextmanager
def _nothing_but_rotary(files: list[ModuleType]) -> Iterator[None]:
    own = {module.__name__ for module in files}
    with contextlib.ExitStack() as stack:
        for module in files:
            for name, value in list(vars(module).items()):
                layer = isinstance(value, type) and issubclass(value, nn.Module)
                # Rotary modules and the model's own classes stay real: they decide which arguments reach get_rope.
                if layer and "otary" not in name and (value.__module__ not in own or name.endswith("MLP")):
                    stack.enter_context(mock.patch.object(module, name, _Empty))
                elif name == "get_rope":
                    stack.enter_context(mock.patch.object(module, name, functools.partial(_stop_after, value)))
                elif name in _PARALLEL:
                    stack.enter_context(mock.patch.object(module, name, _PARALLEL[name]))
        yield


class _Built(Exception):
    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary


def _stop_after(get_rope: Any, *args: Any, **kwargs: Any) -> None:
    raise _Built(get_rope(*args, **kwargs))


def _cache(rotary: nn.Module) -> Tensor:
    """Return the table that a rotary module looks up; of longrope's two, the one for a prompt of the whole context."""
    if isinstance(both := getattr(rotary, "long_short_cos_sin_cache", None), Tensor):
        original = int(
            rotary.original_max_position_embeddings
        )  # positions of the table for short prompts, which is first
        return both[original:] if int(rotary.max_position_embeddings) > original else both[:original]
    if isinstance(cache := getattr(rotary, "cos_sin_cache", None), Tensor):
        return cache
    raise LookupError(f"no cos_sin_cache in {type(rotary).__name__}")
