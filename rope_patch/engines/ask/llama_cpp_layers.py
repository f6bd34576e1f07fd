"""The rotary tables of llama.cpp, of a GGUF file, through its C library.

The library is that of the package xllamacpp, which exports all of it; llama-cpp-py-sync declares its functions, in the
version of the same number. Two tokens are decoded, each as a text of its own, at position 1 and far behind. Every
rotation of a query is looked at before and after: the angle at position 1 is the frequency, and the far one gives it
more digits. Offsets into ggml's tensors are those of ``struct ggml_tensor`` in ``ggml.h``.
"""

import cmath
import ctypes
import math
import struct
from typing import Any

POSITIONS = (1, 512)
ERROR = 4
"""The level of errors in llama.cpp's log."""
MASKS = {"SOFT_MAX": 1, "FLASH_ATTN_EXT": 3}
"""The place of the mask among the sources of an operation."""
HALF_APART = 2
"""The mode of ``GGML_OP_ROPE`` that turns features i and i + n / 2 and not neighbours."""


class Tensor:
    """A tensor of ggml, read from memory."""

    def __init__(self, address: int) -> None:
        raw = ctypes.string_at(address, 320)
        self.address = address
        self.shape = struct.unpack_from("4q", raw, 16)
        self.strides = struct.unpack_from("4Q", raw, 48)
        self.parameters = struct.unpack_from("16i", raw, 84)
        self.sources = struct.unpack_from("10Q", raw, 152)
        (self.data,) = struct.unpack_from("Q", raw, 248)
        self.name = raw[256:].split(b"\0")[0].decode()

    def heads(self, count: int) -> list[list[float]]:
        """Return the first float32 features of the first head of each token."""
        places = [self.data + token * self.strides[2] for token in range(len(POSITIONS))]
        return [[*(ctypes.c_float * count).from_address(place)] for place in places]


def version() -> str:
    """Return the number of the build, which is the last of the package's version."""
    from importlib.metadata import version

    build = version("xllamacpp").rpartition(".")[2]
    return f"b{build}"


def _library() -> str:
    from importlib.util import find_spec

    (folder,) = find_spec("xllamacpp").submodule_search_locations  # type: ignore[union-attr, misc]
    return f"{folder}/xllamacpp.abi3.so"


def model_of(path: str) -> str:
    """Return the path: the model is loaded where it is looked at."""
    return path


def layers_of(path: str) -> dict[str, Any]:
    """Return the context and the layers of a GGUF file."""
    from llama_cpp_py_sync import _cffi_bindings

    ffi = _cffi_bindings.get_ffi()
    lib = ffi.dlopen(_library())
    said: list[str] = []

    def log(level: int, text: Any, _: Any) -> None:
        if level >= ERROR:
            said.append(ffi.string(text).decode(errors="replace").strip())

    logged = ffi.callback("void(enum ggml_log_level, const char *, void *)", log)
    lib.llama_log_set(logged, ffi.NULL)
    lib.llama_backend_init()
    watch = GraphWatch(ffi)
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if model == ffi.NULL:
        raise ValueError(f"llama.cpp does not load the file: {'; '.join(said)}")
    trained = int(lib.llama_model_n_ctx_train(model))
    options = lib.llama_context_default_params()
    options.n_ctx = max(trained, 2 * POSITIONS[-1])
    options.n_seq_max = len(POSITIONS)
    options.n_threads = 1
    options.flash_attn_type = 0
    options.cb_eval = watch.callback
    context = lib.llama_init_from_model(model, options)
    if context == ffi.NULL:
        raise ValueError("llama.cpp makes no context for the file")
    batch = lib.llama_batch_init(len(POSITIONS), 0, 1)
    batch.n_tokens = len(POSITIONS)
    for token, position in enumerate(POSITIONS):
        batch.token[token] = 1
        batch.pos[token] = position
        batch.n_seq_id[token] = 1
        batch.seq_id[token][0] = token
        batch.logits[token] = 1
    if status := lib.llama_decode(context, batch):
        raise ValueError(f"llama.cpp does not decode ({status}): {'; '.join(said)}")
    window = int(lib.llama_model_n_swa(model)) or None
    layers = []
    for layer in range(lib.llama_model_n_layer(model)):
        cos, sin = watch.turned.get(layer, (None, None))
        layers.append({"cos": cos, "sin": sin, "window": window if watch.has_window(layer) else None})
    lib.llama_free(context)
    lib.llama_model_free(model)
    return {"context": trained, "layers": layers}


class GraphWatch:
    """Looks at the nodes of the graph while they are computed, one by one.

    Attributes:
        turned: cos and sin of each pair at position 1, by layer.
        masks: the address of the mask by layer.
        callback: what llama.cpp calls for each node, before and after.
    """

    def __init__(self, ffi: Any) -> None:
        self.turned: dict[int, tuple[list[float], list[float]]] = {}
        self.masks: dict[int, int] = {}
        self.before: list[list[float]] = []
        library = ctypes.CDLL(_library())
        library.ggml_op_desc.restype = ctypes.c_char_p
        library.ggml_op_desc.argtypes = [ctypes.c_void_p]

        def look(pointer: Any, asking: bool, _: Any) -> bool:
            address = int(ffi.cast("uintptr_t", pointer))
            self.look(Tensor(address), library.ggml_op_desc(address).decode(), asking)
            return True  # so that every node is computed before the next one is shown

        self.callback = ffi.callback("bool(struct ggml_tensor *, bool, void *)", look)

    def has_window(self, layer: int) -> bool:
        """Tell whether the mask of a layer is that of the window, which is made after the one for all tokens."""
        return self.masks.get(layer, 0) > min(self.masks.values(), default=0)

    def look(self, node: Tensor, operation: str, asking: bool) -> None:
        """Look at a node, before it is computed (asking) and after."""
        layer = node.name.rpartition("-")[2].split()[0] if "-" in node.name else ""
        if not layer.isdigit():
            return
        index = int(layer)
        if operation in MASKS:
            self.masks[index] = node.sources[MASKS[operation]]
        if operation != "ROPE" or index in self.turned:
            return
        count = node.parameters[1]
        if asking:
            self.before = Tensor(node.sources[0]).heads(count)
            return
        turned = [_turned(*heads, node.parameters[2]) for heads in zip(self.before, node.heads(count), strict=True)]
        each = [_at_position_1(*pair) for pair in zip(*turned, strict=True)]
        self.turned[index] = [one.real for one in each], [one.imag for one in each]


def _turned(before: list[float], after: list[float], mode: int) -> list[complex]:
    """Return the number by which each pair of features was multiplied, as complex numbers."""
    pairs = len(before) // 2
    ends = [(2 * pair, 2 * pair + 1) for pair in range(pairs)]
    if mode & HALF_APART:
        ends = [(pair, pair + pairs) for pair in range(pairs)]
    return [complex(after[one], after[other]) / complex(before[one], before[other]) for one, other in ends]


def _at_position_1(near: complex, far: complex) -> complex:
    """Return the turn at position 1 with the digits of the far one, whose full turns follow from the near one."""
    first, last = POSITIONS
    angle = cmath.phase(near) / first
    turns = round((angle * last - cmath.phase(far)) / (2 * math.pi))
    return cmath.rect(abs(near), (cmath.phase(far) + 2 * math.pi * turns) / last)
