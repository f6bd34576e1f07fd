"""A pretended GPU: tensors that say ``cuda:0`` and compute on the CPU, and counts of what would wait for the GPU.

The benchmarks rehearse large models on it: there long tensors hold no numbers, and a meter prices each operation.

To torch's C++ code such a tensor is one without numbers, on the device ``meta``; to Python it is on the GPU. Every
operation comes to :func:`_run`, which computes it on CPU tensors. As on a GPU, tensors on different devices do not mix,
but for numbers of no dimension, and indices.

This changes torch for the whole process, so a test of it runs in a fork: ``@on("cuda")``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing

import rope_patch
from rope_patch.modeling import attention, prefill
from rope_patch.patching.rotary import PatchedRotary
from support.forks import forked

CPU = torch.device("cpu")
WAITING = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "_local_scalar_dense", "bincount")
"""Operations whose result, or the size of it, the CPU must know before it goes on."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")

waits: collections.Counter[str] = collections.Counter()
"""How often the CPU would have waited for the GPU, by what it waited for and the line of the package."""
kernels: collections.Counter[str] = collections.Counter()
"""How often each operation ran that is no view."""

LIMIT = 2**18
"""Elements of the longest tensor that holds numbers, where a meter listens: ids, positions and the mask of a row do."""

_kind = "cuda"
_meter: Any = None
"""Hears of each operation, wait and piece of memory; None where all tensors hold numbers."""
_beside: list[torch.device] = []
"""The devices of the torch functions that are running: what C++ code makes beside a tensor is on the same device."""


class PretendedTensor(torch.Tensor):
    """A tensor on the pretended GPU.

    Args:
        numbers: its numbers, on the CPU.
        device: the device that it says it is on.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device="meta",
        )
        made.numbers = numbers
        made.place = device
        if _meter is not None:
            _meter.holds(numbers.untyped_storage())
        return made

    device = property(lambda self: self.place)
    is_cuda = property(lambda self: self.place.type == "cuda")
    is_cpu = is_meta = property(lambda self: False)

    def untyped_storage(self):
        return self.numbers.untyped_storage()

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _mapped(change, x):
    """Return arguments or results with their tensors changed; torch's own ``tree_map`` takes three times as long."""
    if isinstance(x, torch.Tensor):
        return change(x)
    if isinstance(x, dict):
        return {name: _mapped(change, value) for name, value in x.items()}
    if isinstance(x, (tuple, list)):
        values = [_mapped(change, value) for value in x]
        return values if isinstance(x, list) else tuple(values)
    return x


def tensors_in(x):
    """Return the tensors among arguments or results, however they are nested."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return []
    return [tensor for value in x for tensor in tensors_in(value)]


def _numbers(x):
    return x.numbers if isinstance(x, PretendedTensor) else x


def _known(x):
    """Return the numbers of a tensor, or zeros where it holds none."""
    x = _numbers(x)
    return torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x


def _device(x):
    """Return a device with its index, which ``cuda`` leaves out."""
    device = torch.device(x)
    return torch.device(_kind, device.index or 0) if device.type == _kind else device


def _wait(reason: str) -> None:
    """Count a wait under the line of the package that is responsible for it."""
    frame = sys._getframe(1)
    package = str(Path(rope_patch.__file__).parent)
    while frame is not None and not frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    line = "elsewhere"
    if frame is not None:
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    waits[f"{reason} at {line}"] += 1
    if _meter is not None:
        _meter.wait()


def _on_gpu(out, device):
    """Return what an operation returned, its tensors on the GPU."""

    def moved(x):
        if isinstance(x, PretendedTensor):
            return x
        if device.type == "mps" and x.dtype == torch.float64:
            raise TypeError("MPS has no float64")
        return PretendedTensor(x, device)

    return _mapped(moved, out)


def _refuse(function, *devices):
    raise RuntimeError(f"{function} found tensors on different devices: {', '.join(map(str, devices))}")


def _check_devices(function, name, args, tensors):
    """Raise RuntimeError where CUDA would, for tensors on different devices."""
    ours = {x.device for x in tensors if isinstance(x, PretendedTensor)}
    if len(ours) > 1:
        _refuse(function, *ours)
    if name in INDEXING:
        # Indices may come from the CPU, and the value that fills a place may be a number.
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.device == CPU:
                _wait("an index to the GPU")
            filled = name != "index" and args[2].numel() == 1 and args[2].device == CPU
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not filled:
                _wait("places of a mask")
        tensors = [x for x in (args[0], *args[2:3]) if isinstance(x, torch.Tensor)]
    for x in tensors:
        written = x is args[0] and function._schema.is_mutable
        if x.device == CPU and (x.ndim or written):
            _refuse(function, *ours, CPU)


def _causal_lower_right(*size):
    with _disable_current_modes():  # torch makes this subclass of a tensor in no mode
        return bias.causal_lower_right(*size)


def _run(function, args, kwargs):
    """Run an operation of torch as the GPU would, or on the CPU if none of its tensors is on the GPU."""
    name = function._schema.name.partition("::")[2]
    tensors = tensors_in((args, kwargs))
    device = ours = next((x.device for x in tensors if isinstance(x, PretendedTensor)), None)
    if kwargs.get("device") is not None:
        device = _device(kwargs["device"])
        if device.type == "meta" and _beside:
            device = _beside[-1]
    if name == "_to_copy" and device is not None:
        return _move(function, args[0], device, kwargs)
    if ours is None and (device is None or device.type != _kind):
        return function(*args, **kwargs)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU, "pin_memory": False}
    if kwargs.get("generator") is not None:
        _refuse(function, device, "a generator of the CPU")
    if name == "copy_" and args[0].device != args[1].device:
        device = args[0].device
        if args[1].ndim or args[1].device != CPU:
            _wait(f"a copy to {device.type}")
    elif tensors:
        _check_devices(function, name, args, tensors)
    if name in WAITING:
        _wait(name)
    if not function.is_view:
        kernels[name] += 1
    values = _mapped(_numbers, (args, kwargs))
    if function is torch.ops.aten._scaled_dot_product_flash_attention.default and _meter is None:
        # A CPU has no such kernel of a GPU, but one of its own.
        query, key, value, dropout, causal, _ = values[0]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = kernel(query, key, value, dropout, causal, **values[1])
    elif _meter is None:
        out = function(*values[0], **values[1])
    else:
        out = _without_numbers(function, name, *values)
        _meter.run(function, name, values[0], out)
    if function is torch.ops.aten.pow.Scalar:
        out = out.nextafter(2 * out)  # the last bit of a power may differ on a GPU
    if device.type != _kind:
        return out
    out = _on_gpu(out, device)
    if tensors and (function._schema.is_mutable or torch.Tag.inplace_view in function.tags):
        return return_and_correct_aliasing(function, args, kwargs, out)
    return out


def _move(function, source, device, kwargs):
    """Copy a tensor to a device, in another dtype if one is asked for. Only between two GPUs nothing waits."""
    waiting = CPU in (source.device, device) and source.device != device and not kwargs.get("non_blocking")
    if waiting and source.numel():
        _wait(f"a copy to {device.type}")
    rest = {name: x for name, x in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    kernels["_to_copy"] += 1
    there = device.type == _kind
    copied = function(_numbers(source) if there else _known(source), **rest)
    if _meter is not None and (there or isinstance(source, PretendedTensor)):
        _meter.run(function, "_to_copy", (_numbers(source),), copied)
    if _meter is not None and there and copied.numel() > LIMIT:
        copied = copied.to("meta")
    return _on_gpu(copied, device) if there else copied.to(device)


def _places(index):
    """Return an index; for a mask, which says only by its numbers how many places it has, those places."""
    masks = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    return _known(index).nonzero().unbind(1) if masks else [index]


def _without_numbers(function, name, args, kwargs):
    """Run an operation; what is longer than the limit, or follows from what has no numbers, gets none.

    A short result of long tensors is 0, and that of ``all`` is True, so that control flow goes on as it usually does.
    """

    def on_meta(x):
        return x.to("meta")

    if name in INDEXING:
        args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
    tensors = tensors_in((args, kwargs))
    known = not any(x.is_meta for x in tensors) and "attention" not in name  # a CPU has no such kernels of a GPU
    changes = function._schema.is_mutable
    if known and (changes or function.is_view or name in WAITING or (tensors and _broadcast(tensors) <= LIMIT)):
        return function(*args, **kwargs)
    if name in WAITING:
        args = _mapped(_known, args)
        return function(*args, **kwargs)
    if changes and not args[0].is_meta:
        return args[0]  # a short tensor keeps its numbers where those written are unknown
    there = kwargs | {"device": "meta"} if "device" in kwargs else kwargs
    out = function(*_mapped(on_meta, args), **_mapped(on_meta, there))
    if changes or function.is_view or any(x.numel() > LIMIT for x in tensors_in(out)):
        return out
    if known:
        return function(*args, **kwargs)
    fill = int(name == "all")
    return _mapped(lambda x: torch.full(x.shape, fill, dtype=x.dtype), out)


def _broadcast(tensors):
    """Return how many elements the tensors have together, where each is expanded to the sizes of the others."""
    sizes = itertools.zip_longest(*(reversed(x.shape) for x in tensors), fillvalue=1)
    return math.prod(map(max, sizes))


class _Functions(TorchFunctionMode):
    """Give every torch function its device in a form that reaches :func:`_run`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        ours = next((x for x in tensors_in((args, kwargs)) if isinstance(x, PretendedTensor)), None)
        if function is torch.Tensor.to:
            return self._to(*args, **kwargs)
        place = kwargs.get("device")
        if place is not None and _device(place).type == _kind:
            kwargs["device"] = _device(place)
            if function in (torch.tensor, torch.as_tensor, torch.asarray):
                del kwargs["device"]
                return function(*args, **kwargs).to(_device(place))
        if ours is None:
            return function(*args, **kwargs)
        _beside.append(ours.device)
        try:
            return function(*args, **kwargs)
        finally:
            _beside.pop()

    @staticmethod
    def _to(tensor, *args, **kwargs):
        """Move a tensor; one that is there already stays, which C++ code could not know."""
        names = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], torch.dtype):
            names = names[1:]
        asked = dict(zip(names, args, strict=False)) | kwargs
        device = _device(asked.pop("device", None) or tensor.device)
        dtype = asked.pop("dtype", None) or tensor.dtype
        if (device, dtype) == (tensor.device, tensor.dtype) and not asked.get("copy"):
            return tensor
        if not isinstance(tensor, PretendedTensor) and device.type != _kind:
            return tensor.to(device, dtype, **asked)
        asked.pop("copy", None)
        return torch.ops.aten._to_copy(tensor, device=device, dtype=dtype, **asked)


class _Operations(TorchDispatchMode):
    """Send operations to :func:`_run` that have no tensor on the GPU yet, such as those that make one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def on(kind: str):
    """Run a test, which takes ``tmp_path``, in a fork with two pretended GPUs of a kind, ``cuda`` or ``mps``."""

    def decorate(test):
        @functools.wraps(test)
        def run(tmp_path, *args, **kwargs):
            log = tmp_path / "log"

            def work():
                try:
                    pretend(kind)
                    test(tmp_path, *args, **kwargs)
                except BaseException:
                    log.write_text(traceback.format_exc())
                    raise

            assert forked(work) == 0, log.read_text()

        return run

    return decorate


def counted(call) -> int:
    """Return how often a call waits for the GPU."""
    waits.clear()
    kernels.clear()
    call()
    return waits.total()


def _answer(module, **answers) -> None:
    """Replace functions of a module by others that return these values."""
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer, **__: answer)


def pretend(kind: str, meter: Any = None) -> None:
    """Give this process pretended GPUs, for good.

    Args:
        kind: ``cuda`` or ``mps``.
        meter: an object whose ``run``, ``wait`` and ``holds`` hear of each operation, wait and storage; long tensors
            then hold no numbers.
    """
    global _kind, _meter
    _kind = kind
    _meter = meter
    _answer(torch.accelerator, is_available=True, current_accelerator=torch.device(kind), device_count=2)
    _answer(torch.accelerator, empty_cache=None)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers reads weights in threads, and these modes are of one
    if kind == "cuda":
        _answer(torch.cuda, _lazy_init=None, is_available=True, device_count=2, get_device_name="pretended")
        _answer(torch.cuda, is_bf16_supported=True, current_device=0, set_device=None, synchronize=None)
        _answer(torch.cuda, mem_get_info=(2**37, 2**37), memory_reserved=0, memory_allocated=0)
        # torch then makes the mask that its flash attention does without.
        for module in (attention, prefill):
            module.can_use_flash_attention = lambda asked: asked.query.dtype == torch.bfloat16
        attention.can_use_efficient_attention = lambda asked: False
        prefill.causal_lower_right = _causal_lower_right
    # The package holds tables of plain tensors only.
    PatchedRotary.table = functools.cache(PatchedRotary.table)
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied weights stay tied
    _Operations().__enter__()
    _Functions().__enter__()
