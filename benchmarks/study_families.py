"""Compare rotary tables on three families: SmolLM2-135M, Gemma 3 270M (a hybrid with sliding windows), Qwen2.5-Coder.

    python benchmarks/study_families.py --novels FOLDER --wikitext FILE -o benchmarks/results/study_families.json

The checkpoints must be in build (``make smollm2-checkpoint gemma3-checkpoint qwen-checkpoint``). FOLDER holds novels as
text files, of which three are held out for evaluation; FILE is the test part of WikiText-2. The study is a list of
cells, which ``--list`` shows with the minutes that each one is expected to take; ``--cells 'gemma3-text-*'`` chooses
some. The report is written after each cell, and a cell that it holds is not measured again: to measure one anew, delete
it there. What an interrupted cell has finished is kept in build/study_families.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import rope_patch
from measuring import chosen_cells, command, environment, finished_cells, write
from pair_bits import RULES, Allocator, bits_by_loss, equal_bits, keys_by_pair, stored_bits
from public_checkpoint import BUILD, CHECKPOINTS
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.texts.builtin_text import builtin_text
from rope_patch.evaluation.texts.documents import spread_windows
from rope_patch.kv_cache.cache import CacheMaker, quantized
from rope_patch.kv_cache.schemes import Scheme, effective_bits
from rope_patch.modeling.scoring import Reader
from rope_patch.runtime.folders import write_atomically

HELD_OUT = ("moby_dick.txt", "pride_and_prejudice.txt", "sherlock_holmes.txt")
WINDOWS = 3
POSITIONS = (0, 1024, 2048, 4096, 8192, 16384, 32768, 49152, 65536)
"""Positions between which losses are measured [tokens]."""
DEPTHS = (0.0, 1 / 3, 2 / 3, 1.0)
LORA_ROWS, LORA_TOKENS = 200, 2048

P_VALUES = ("0.9", "0.75", "0.625", "0.5", "0.25", "0")
EXTENDING = {
    "gemma3": (
        "yarn:factor=2", "ntk:factor=2", "abf:factor=4", "abf:factor=16", "pi:factor=2", "pi:factor=8",
        "mrrope:factor=2", "truncated:context=32768", "yarn:factor=2+p_rope:p=0.75",
    ),
    "smollm2": ("yarn:factor=2", "abf:factor=4", "yarn:factor=2+p_rope:p=0.9"),
}  # fmt: skip
FACTORS = ("yarn:factor=2", "yarn:factor=2:mscale=1.5:mscale_all_dim=1", "yarn:factor=2:attention_factor=1")
"""YaRN with its attention factor of 1.07 at twice the context, with 1.03, and with 1."""
FORMATS = ("vllm:fp8", "llama.cpp:q4_0", "vllm:turboquant-4", "int4-token", "kivi-2")
BY_POSITION = ("llama.cpp:q8_0", *FORMATS[:1], "llama.cpp:q5_0", *FORMATS[1:3], "kivi-4", "kivi-2")
"""Formats whose cost is measured by position."""
BITS = (2, 3, 4)
"""Mean numbers of bits of a pair of keys that rules share out."""
CALIBRATION = (4, 1024)
"""Windows of the text that rules know, and their length [tokens]; half the context of bundled models."""
KEY_BIASES = (0.0, 10.0, 100.0)
"""Biases of the slowest pair of keys, whose features are of size 1 or so without one."""
KEY_FORMATS = ("int3", "int3.pre", "int3.hadamard", "turboquant3.hadamard", "q4_0.hadamard", "int3.channel32")
PUBLISHED = (
    *("k=int4;v=none", "k=int4.hadamard;v=none", "k=int3;v=none", "k=int3.hadamard;v=none"),
    *("k=q4_0;v=none", "k=q4_0.hadamard;v=none", "k=q5_0;v=none", "k=q5_0.hadamard;v=none"),
    *("k=int4.token32;v=int2.token32", "k=int2.token32;v=int4.token32"),
    *("k=int4.channel32;v=int2.token32", "k=int2.channel32;v=int4.token32"),
)
"""Formats on which others have published numbers: rotated or not, and 4 and 2 bits for keys and values or reversed."""
STRIDE, STATES_AT_ONCE = 4, 64
"""Distributions are compared at every fourth token, 64 at a time."""
PARTS = ("k=int4;v=none", "k=none;v=int4", "k=int4.hadamard;v=none", "k=int4.channel32;v=none", "k=int4.pre;v=none")
"""Formats that show where the cost of int4-token comes from."""

LLAMA_LAYERS = 30
PLACES: dict[str, Sequence[int]] = {
    "all": range(LLAMA_LAYERS),
    "every second": range(1, LLAMA_LAYERS, 2),
    "every third": range(2, LLAMA_LAYERS, 3),
    "every sixth": range(5, LLAMA_LAYERS, 6),
    "first half": range(LLAMA_LAYERS // 2),
    "last half": range(LLAMA_LAYERS // 2, LLAMA_LAYERS),
    **{f"layers {first} to {first + 4}": range(first, first + 5) for first in range(0, LLAMA_LAYERS, 5)},
}
"""Layers of SmolLM2 that get a table of their own; "every sixth" is where Gemma 3 has its full attention."""
WINDOW, SINKS = 512, 4
"""The window that layers of SmolLM2 are limited to in some cells, and the first tokens that they see besides."""
WINDOWED = {
    "windows": (),
    "windows, patched where full": PLACES["every sixth"],
    "windows, patched where sliding": tuple(sorted({*range(LLAMA_LAYERS)} - {*PLACES["every sixth"]})),
}
"""Cells in which all but every sixth layer of SmolLM2 see a window only, and the layers that are patched."""


class Cell(NamedTuple):
    """One measurement.

    Attributes:
        model: the checkpoint, a key of ``public_checkpoint.CHECKPOINTS``.
        kind: a key of :data:`MEASURES`.
        length: the length of windows, prompts or rows [tokens].
        table: a method string.
        where: the layers that get the table: those that ``apply`` chooses, "sliding_attention", a key of
            :data:`PLACES` or one of :data:`WINDOWED`.
        window: the one window that a long cell reads; all of them where it is None.
        adapted: whether the model is measured after LoRA.
    """

    model: str
    kind: str
    length: int
    table: str = "default"
    where: str = ""
    window: int | None = None
    adapted: bool = False

    @property
    def name(self) -> str:
        """What ``--cells`` calls it, and the stem of the file of its finished parts."""
        parts = [self.model, self.kind, str(self.length), self.table, self.where.replace(" ", "_").replace(",", "")]
        parts += [f"window{self.window}"] if self.window is not None else []
        return "-".join([part for part in parts if part] + ["lora"] * self.adapted)

    @property
    def bundled(self) -> bool:
        """Whether the model is one of those that ship with rope_patch."""
        return self.model not in CHECKPOINTS

    @property
    def tokens(self) -> float:
        """The number of tokens that it reads, of which a step of training counts three times."""
        prompts = sum(1 - depth for depth in DEPTHS) + 1
        return {
            "text": self.length * (WINDOWS if self.window is None else 1),
            "code": self.length * WINDOWS,
            "wiki": self.length * 8 * WINDOWS,
            "heads": 100_000.0,
            "caches": self.length * (4 + prompts) * (1 + len(FORMATS + PARTS)),
            "positions": self.length * (WINDOWS if self.length <= 4096 else 1) * (1 + len(BY_POSITION)),
            "published": self.length * 8 * (5 + len(PUBLISHED)),
            "pair_bits": self.length * 4 * (1 + len(BITS) * (4 + len(RULES))),
            "train": 3 * LORA_ROWS * LORA_TOKENS,
        }.get(self.kind, self.samples * prompts * self.length)

    @property
    def samples(self) -> int:
        """The number of haystacks: one where two would take ten minutes or more."""
        return 1 if self.length > 16384 or self.model == "qwen" else 2


def all_cells() -> Iterator[Cell]:
    """Yield the cells of the study, the cheapest of the most telling ones first."""
    sweep = [f"p_rope:p={p}" for p in P_VALUES]
    yield Cell("smollm2", "text", 8192)
    for where in PLACES:
        yield Cell("smollm2", "text", 8192, "p_rope:p=0.75", where)
    for table in ("p_rope:p=0.9", "p_rope:p=0.5"):
        yield Cell("smollm2", "text", 8192, table, "all")
        yield Cell("smollm2", "text", 8192, table, "every sixth")
    yield Cell("smollm2", "text", 8192, "default", "windows")
    for table, where in itertools.product(("p_rope:p=0.75", "p_rope:p=0.5"), list(WINDOWED)[1:]):
        yield Cell("smollm2", "text", 8192, table, where)
    for table in ("default", *sweep, *EXTENDING["gemma3"]):
        yield Cell("gemma3", "text", 8192, table)
    for table in ("p_rope:p=0.75", "p_rope:p=0.5", "p_rope:p=0.25", "yarn:factor=2"):
        yield Cell("gemma3", "text", 8192, table, "sliding_attention")
    for table in ("default", "yarn:factor=2", "abf:factor=4", "p_rope:p=0.75", "p_rope:p=0.5"):
        yield Cell("gemma3", "wiki", 1024, table)
    yield Cell("gemma3", "heads", 4096)
    for table in ("default", "p_rope:p=0.75", "p_rope:p=0.5"):
        yield Cell("gemma3", "caches", 1024, table)
    long = ["default", "yarn:factor=2", "abf:factor=4", "p_rope:p=0.75", "abf:factor=16", "ntk:factor=2"]
    long += ["p_rope:p=0.625", "yarn:factor=2+p_rope:p=0.75", "pi:factor=8", "mrrope:factor=2", "pi:factor=2"]
    for table in long:
        yield Cell("gemma3", "text", 65536, table, window=0)
    for task, length in itertools.product(("passkey", "niah_multikey_2"), (4096, 16384, 32768, 65536)):
        for table in long[:4]:
            yield Cell("gemma3", task, length, table)
    for length in (4096, 8192, 16384):
        for table in ("default", *EXTENDING["smollm2"]):
            yield Cell("smollm2", "niah_multikey_2", length, table)
    for window in range(1, WINDOWS):
        for table in long[:4]:
            yield Cell("gemma3", "text", 65536, table, window=window)
    qwen = ("default", *FACTORS, "abf:factor=2", "abf:factor=4", "mrrope:factor=2", "ntk:factor=2", *sweep[:4])
    for kind, tables in (("text", qwen), ("code", qwen[:10])):
        for table in tables:
            yield Cell("qwen", kind, 8192, table)
    for table, task in itertools.product(
        ("default", FACTORS[0], FACTORS[2]), ("niah_multikey_2", "json_kv", "passkey")
    ):
        yield Cell("qwen", task, 8192, table)
    for table in FACTORS:
        yield Cell("smollm2", "text", 8192, table)
        yield Cell("gemma3", "text", 8192, table)
    for table in ("default", *FACTORS):
        yield Cell("smollm2", "text", 16384, table, window=0)
        yield Cell("gemma3", "text", 65536, table, window=0)
    for table in ("default", *FACTORS, "abf:factor=4", "p_rope:p=0.75"):
        yield Cell("qwen-1.5b", "text", 4096, table)
    tables = ("default", "yarn:factor=2", "p_rope:p=0.75")
    for model, length in (("bundled-llama", 256), ("bundled-gemma3", 256), ("smollm2", 2048), ("gemma3", 2048)):
        for table in tables:
            yield Cell(model, "pair_bits", length, table)
    yield Cell("bundled-llama", "key_bias", 256)
    yield Cell("smollm2", "one_pass", 1024)
    yield Cell("smollm2", "published", 1024)
    yield Cell("gemma3", "published", 1024)
    for model, length, table in (
        ("smollm2", 8192, "default"), ("smollm2", 8192, "p_rope:p=0.75"), ("smollm2", 16384, "yarn:factor=2"),
        ("gemma3", 16384, "default"), ("gemma3", 16384, "p_rope:p=0.75"), ("gemma3", 16384, "yarn:factor=2"),
        ("gemma3", 32768, "default"), ("gemma3", 65536, "yarn:factor=2"),
    ):  # fmt: skip
        yield Cell(model, "positions", length, table)
    for table in ("p_rope:p=0.75", "yarn:factor=2", "default"):
        yield Cell("gemma3", "train", LORA_TOKENS, table)
        yield Cell("gemma3", "text", 8192, table, adapted=True)
        yield Cell("gemma3", "text", 65536, table, window=0, adapted=True)
        yield Cell("gemma3", "passkey", 65536, table, adapted=True)


@dataclass(frozen=True)
class Study:
    """Where everything is.

    Attributes:
        novels: a folder of text files.
        wikitext: a text file.
        root: the folder of finished parts, texts and adapters.
    """

    novels: Path
    wikitext: Path
    root: Path

    def folder(self, cell: Cell) -> Path:
        """Return the folder of a cell's checkpoint."""
        if cell.bundled:
            return rope_patch.data_path("assets") / cell.model.removeprefix("bundled-")
        return BUILD / cell.model / CHECKPOINTS[cell.model].model

    def parts(self, cell: Cell) -> Path:
        """Return the file of a cell's finished parts."""
        return self.root / "parts" / f"{cell.name}.jsonl"

    def adapter(self, cell: Cell) -> Path:
        """Return the folder of the adapter of a cell's table."""
        trained = Cell(cell.model, "train", LORA_TOKENS, cell.table)
        return self.root / "adapters" / trained.name

    def tokenizer(self, cell: Cell) -> Any:
        """Return the tokenizer of a cell's checkpoint."""
        return AutoTokenizer.from_pretrained(self.folder(cell))

    def text(self, held_out: bool = True) -> str:
        """Return the novels that are held out, or the others."""
        files = sorted(self.novels.glob("*.txt"))
        missing = {*HELD_OUT} - {file.name for file in files}
        if missing:
            raise FileNotFoundError(f"{self.novels} lacks {', '.join(sorted(missing))}, which are held out")
        return "\n\n".join(f.read_text(encoding="utf-8") for f in files if (f.name in HELD_OUT) == held_out)

    def file(self, held_out: bool) -> Path:
        """Return a file of the novels that are held out, or of the others."""
        path = self.root / ("held-out.txt" if held_out else "training.txt")
        if not path.exists():
            write_atomically(path, self.text(held_out))
        return path

    def model(self, cell: Cell) -> Any:
        """Return the model that a cell measures, in bfloat16."""
        if cell.adapted:
            adapted = rope_patch.load(self.adapter(cell), dtype=torch.bfloat16)
            return adapted.merge_and_unload().eval()
        model = rope_patch.load(self.folder(cell), dtype=torch.bfloat16).eval()
        if cell.where in PLACES or cell.where in WINDOWED:
            put_on_layers(model, cell)
        elif cell.table != "default":
            reach = max(cell.length, model.config.max_position_embeddings)
            kinds = [cell.where] if cell.where else None
            rope_patch.apply(model, cell.table, target_length=reach, layer_types=kinds)
        return model


def put_on_layers(model: Any, cell: Cell) -> None:
    """Give some layers of a Llama another table, and others a sliding window, by hooks before their attention."""
    with rope_patch.patched(model, cell.table):
        rotary = copy.deepcopy(model.model.rotary_emb)
    position = torch.arange(cell.length)
    distance = position[:, None] - position
    window = (distance >= 0) & ((distance < WINDOW) | (position < SINKS))

    def change_table(module: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, inputs | {"position_embeddings": rotary(inputs["hidden_states"], inputs["position_ids"])}

    def change_mask(module: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, inputs | {"attention_mask": window[None, None]}

    for index, layer in enumerate(model.model.layers):
        if index in PLACES.get(cell.where, WINDOWED.get(cell.where, ())):
            layer.self_attn.register_forward_pre_hook(change_table, with_kwargs=True)
        if cell.where in WINDOWED and index not in PLACES["every sixth"]:
            layer.self_attn.register_forward_pre_hook(change_mask, with_kwargs=True)


# --- measuring

Cache = Callable[[], AbstractContextManager[CacheMaker]]


def text(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure the loss of windows of novels, or of code, between doubling positions [nats/token]."""
    edges = [edge for edge in POSITIONS if edge <= cell.length]
    source = builtin_text("heldout") if cell.kind == "code" else study.text()
    windows, digest = spread_windows(study.tokenizer(cell), source, cell.length, WINDOWS)
    chosen = windows if cell.window is None else windows[cell.window : cell.window + 1]
    score = perplexity(study.model(cell), chosen, window=cell.length, buckets=edges, resume=study.parts(cell))
    nll = {
        f"{low}-{high}": [d.nll[i] / d.tokens[i] for d in score.documents for i in score.inside(low, high)]
        for low, high in itertools.pairwise(edges)
    }
    return {"sha256": digest, "nll": nll}


def wiki(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure the loss of short windows of WikiText-2 [nats/token]."""
    whole = study.wikitext.read_text(encoding="utf-8")
    windows, digest = spread_windows(study.tokenizer(cell), whole[len(whole) // 2 :], cell.length, 8 * WINDOWS)
    score = perplexity(study.model(cell), windows, window=cell.length, resume=study.parts(cell))
    return {"sha256": digest, "nll": {f"0-{cell.length}": [d.total_nll / d.total_tokens for d in score.documents]}}


def prompts(study: Study, cell: Cell) -> dict[str, Any]:
    """Ask for what is hidden in noise, as plain text."""
    asked = retrieval(
        study.model(cell),
        study.tokenizer(cell),
        cell.kind,
        lengths=[cell.length],
        depths=DEPTHS,
        samples=cell.samples,
        chat_template="off",
        resume=study.parts(cell),
    )
    samples = asked.samples(cell.length)
    return {
        "correct": [each.correct for each in samples],
        "logprob": [each.logprob for each in samples],
        "answers": [each.output for each in samples],
        "expected": [each.expected for each in samples],
    }


def heads(study: Study, cell: Cell) -> dict[str, Any]:
    """Analyse how the heads use the table, for each layer type: shares of the pairs, outliers and their bounds."""
    model = study.model(cell)
    result = rope_patch.analyze(
        model, study.tokenizer(cell), {"novels": study.text()}, tokens=2 * cell.length, window=cell.length,
        p_values=[float(p) for p in P_VALUES[:-1]],
    )  # fmt: skip
    outliers = result.outliers("key")
    by_type = {}
    for kind in dict.fromkeys(layer.layer_type for layer in result.capture.layers):
        layers = [layer for layer in result.capture.layers if layer.layer_type == kind]
        pairs = layers[0].query.pairs
        here = [pair for pair in outliers if pair.layer in {layer.index for layer in layers}]
        usage = {}
        for states in ("query", "key"):
            norms = [getattr(layer, states).mean_norm for layer in layers]
            usage[states] = torch.stack([(norm / norm.sum(-1, keepdim=True)).mean(0) for norm in norms]).mean(0)
        by_type[str(kind)] = {
            "layers": [layer.index for layer in layers],
            "context": layers[0].context,
            "pairs below the frequency bound": int((layers[0].inv_freq * layers[0].context < 2 * torch.pi).sum()),
            "usage": {states: share.tolist() for states, share in usage.items()},
            "mean keys": len(layers) * layers[0].query.heads * pairs,
            "outliers": len(here),
            "kinds": Counter(pair.kind for pair in here),
            "longest": max((pair.ratio for pair in here), default=None),
            "by pair": [sum(pair.pair == i for pair in here) for i in range(pairs)],
        }
    whole = json.loads(result.to_json())
    return {
        "by layer type": by_type,
        **{name: whole[name] for name in ("findings", "p_sweep")},
    }


def caches(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure quantized caches, and where the cost of int4 comes from."""
    spec = rope_patch.EvalSpec(
        lengths=[cell.length], depths=DEPTHS, samples=1, windows=4, text=str(study.file(held_out=True)),
        chat_template="off",
    )  # fmt: skip
    checked = rope_patch.kv_check(
        study.model(cell), study.tokenizer(cell), [*FORMATS, *PARTS], spec, resume=study.parts(cell)
    )
    whole = json.loads(checked.to_json())
    for row in whole["rows"]:
        row["lengths"] = row["lengths"][str(cell.length)]
    return {"summary": whole["summary"], "rows": whole["rows"]}


@torch.no_grad()
def states(reader: Reader, ids: Tensor, past: Any, chunk: int | None = None) -> Tensor:
    """Return the last hidden states of a text that is read through a cache: (tokens, features)."""
    return torch.cat([hidden[0] for _, hidden in reader.read(ids[None], past, chunk)])


def compare_caches(
    model: Any, windows: Sequence[Tensor], edges: Sequence[int], caches: Mapping[str, Cache]
) -> list[dict[str, Any]]:
    """Measure what caches change between some positions, for each window: KL, equal most probable tokens, and loss.

    The first row is full precision.
    """
    reader = Reader(model)

    @torch.no_grad()
    def compared(exact: Tensor, rough: Tensor, ids: Tensor) -> Tensor:
        parts = (sequence.split(STATES_AT_ONCE) for sequence in (exact[:-1:STRIDE], rough[:-1:STRIDE], ids[1::STRIDE]))
        columns = []
        for one, other, following in zip(*parts, strict=True):
            p, q = (reader.logits(part).log_softmax(-1) for part in (one, other))
            loss = -q.gather(-1, following[:, None])[:, 0]
            columns.append(torch.stack([(p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).float(), loss]))
        return torch.cat(columns, 1).double()

    def chunked(ids: Tensor) -> Tensor:
        return states(reader, ids, reader.new_cache(len(ids)), reader.chunk(len(ids)))

    exact = [chunked(window) for window in windows]
    measured = {"none": [compared(one, one, ids) for one, ids in zip(exact, windows, strict=True)]}
    for name, make in caches.items():
        with make() as maker:
            rough = [states(reader, window, maker()) for window in windows]
        measured[name] = [compared(*each) for each in zip(exact, rough, windows, strict=True)]
        print(f"  {name}: KL {sum(float(part[0].mean()) for part in measured[name]) / len(windows):.4f}", flush=True)
    return [
        {
            "format": name,
            **{
                what: {
                    f"{low}-{high}": [float(part[i, low // STRIDE : high // STRIDE].mean()) for part in parts]
                    for low, high in itertools.pairwise(edges)
                }
                for i, what in enumerate(("kl", "same", "nll"))
            },
        }
        for name, parts in measured.items()
    ]


def positions(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure what formats cost between doubling positions."""
    windows, digest = spread_windows(study.tokenizer(cell), study.text(), cell.length, WINDOWS)
    count = WINDOWS if cell.length <= 4096 else 1
    model, edges = study.model(cell), [edge for edge in POSITIONS if edge <= cell.length]
    caches = {text: functools.partial(quantized, model, text) for text in BY_POSITION}
    rows = compare_caches(model, [window.ids for window in windows[:count]], edges, caches)
    return {"sha256": digest, "rows": rows}


def pair_bits(study: Study, cell: Cell) -> dict[str, Any]:
    """Compare rules that share out the bits of keys among rotary pairs, and two formats with equal bits."""
    model, tokenizer = study.model(cell), study.tokenizer(cell)
    count, known = CALIBRATION
    calibration, _ = spread_windows(tokenizer, study.text(held_out=False), min(known, cell.length), count)
    windows, digest = spread_windows(tokenizer, study.text(), cell.length, 4)
    rows = torch.stack([window.ids for window in calibration])
    allocator, caches, stored = Allocator(model, rows), dict[str, Cache](), dict[str, Any]()
    for average in BITS:
        rules = {rule: allocator.bits(rule, average) for rule in RULES}
        if cell.bundled and cell.table == "default" and average == BITS[0]:  # more bits take hours
            rules["oracle"] = bits_by_loss(model, rows[:1], average)
        for rule, bits in rules.items():
            # Equal bits, rotated, are TurboQuant's.
            options = {"rotated_from": 0} if rule == "uniform" else {}
            caches[f"{rule} {average}"] = functools.partial(keys_by_pair, model, bits, **options)
            stored[f"{rule} {average}"] = {
                "bits": stored_bits(bits),
                "by pair": torch.cat(list(bits.values())).double().mean(0).tolist(),
            }
        for rule in ("uniform", "product"):
            name = f"{rule} {average}, one norm"
            caches[name] = functools.partial(keys_by_pair, model, rules[rule], scales=allocator.scales)
            stored[name] = {"bits": stored_bits(rules[rule], norms=1)}
        for text in (f"int{average}.hadamard", f"int{average}.channel32"):
            caches[text] = functools.partial(quantized, model, f"k={text};v=none")
            side, width = Scheme.parse(text).key, 2 * allocator.energies[0].key.shape[1]
            stored[text] = {"bits": effective_bits(side, width)}
    edges = [edge for edge in POSITIONS if edge < cell.length] + [cell.length]
    result = [
        row | stored.get(row["format"], {})
        for row in compare_caches(model, [window.ids for window in windows], edges, caches)
    ]
    fewest = [
        row for row in result if row["format"].startswith(("none", f"int{BITS[0]}.")) or f" {BITS[0]}" in row["format"]
    ]
    for row in fewest:  # with more bits nearly all keys are found
        with caches.get(row["format"], contextlib.nullcontext)() as cache:
            found = retrieval(
                model, tokenizer, "passkey", lengths=[cell.length], depths=DEPTHS, samples=2, chat_template="off",
                cache=cache,
            )  # fmt: skip
        row |= {name: [getattr(each, name) for each in found.samples(cell.length)] for name in ("correct", "logprob")}
    return {"sha256": digest, "rows": result}


def published(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure formats on which others have published numbers."""
    model = study.model(cell)
    windows, digest = spread_windows(study.tokenizer(cell), study.text(), cell.length, 8)
    ids = [window.ids for window in windows]
    caches: dict[str, Cache] = {text: functools.partial(quantized, model, text) for text in PUBLISHED}
    for width in (2, 3, 4, 5):
        bits = equal_bits(model, width)
        caches[f"keys: {width} bits, rotated, Lloyd-Max"] = functools.partial(keys_by_pair, model, bits, rotated_from=0)
    return {"sha256": digest, "rows": compare_caches(model, ids, [0, cell.length], caches)}


def one_pass(study: Study, cell: Cell) -> dict[str, Any]:
    """Compare the time of one pass through a quantized cache with that of decoding token by token [s]."""
    model, rows = study.model(cell), []
    ((window,), digest) = spread_windows(study.tokenizer(cell), study.text(), cell.length, 1)
    for text in FORMATS:
        with quantized(model, text) as maker:
            seconds, read = {}, {}
            for name, chunk in (("one pass", None), ("decoding", 1)):
                began = time.perf_counter()
                read[name] = states(Reader(model), window.ids, maker(), chunk)
                seconds[name] = time.perf_counter() - began
        apart = float((read["one pass"] - read["decoding"]).float().norm() / read["decoding"].float().norm())
        rows.append({"format": text, "seconds": seconds, "relative difference of states": apart})
    return {"sha256": digest, "rows": rows}


def key_bias(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure what a large bias of keys, such as that of Qwen2, does to formats, on a bundled model.

    The bias is put onto the slowest pair of each head, where it hardly changes the attention of full precision, since
    all keys have it.
    """
    model, tokenizer = study.model(cell), study.tokenizer(cell)
    windows, digest = spread_windows(tokenizer, study.text(), cell.length, 8)
    calibration, _ = spread_windows(tokenizer, study.text(held_out=False), cell.length, 4)
    config = Qwen2Config(**{key: value for key, value in model.config.to_dict().items() if key != "model_type"})
    biased: Any = Qwen2ForCausalLM(config).eval()
    biased.load_state_dict(model.state_dict(), strict=False)  # it has biases besides, which are 0
    slowest = [half * config.head_dim // 2 - 1 for half in (1, 2)]
    result = []
    for size in KEY_BIASES:
        for layer in biased.model.layers:
            layer.self_attn.k_proj.bias.data.view(-1, config.head_dim)[:, slowest] = size
        rows = torch.stack([window.ids for window in calibration])
        bits = {rule: Allocator(biased, rows).bits(rule, 3) for rule in ("energy", "product")}
        caches: dict[str, Cache] = {
            text: functools.partial(quantized, biased, f"k={text};v=none") for text in KEY_FORMATS
        }
        caches |= {f"{rule} 3": functools.partial(keys_by_pair, biased, bits[rule]) for rule in bits}
        rows_of_size = compare_caches(biased, [window.ids for window in windows], [0, cell.length], caches)
        result += [{"bias": size, **row} for row in rows_of_size]
    return {"sha256": digest, "rows": result}


def train(study: Study, cell: Cell) -> dict[str, Any]:
    """Train a LoRA adapter on novels, on short rows at skipped positions up to twice the context (PoSE)."""
    from rope_patch.options.finetune import RecipeOptions
    from rope_patch.options.yaml_and_json import from_dict
    from rope_patch.training.finetune import finetune

    target = 2 * json.loads((study.folder(cell) / "config.json").read_text())["max_position_embeddings"]
    options = {
        "model": {"name": str(study.folder(cell)), "dtype": "bfloat16"},
        "patch": {"method": cell.table, "target_length": target},
        "data": {"source": str(study.file(held_out=False)), "length": cell.length, "positions": "pose"},
        "train": {
            "steps": LORA_ROWS // 4,
            "accumulate": 4,
            "learning_rate": 4e-4,
            "scheduler": "cosine",
            "warmup": 0.1,
            "checkpointing": False,
            "save_every": 10,
            "keep": 1,
        },
        # evaluated by cells of their own
        "evaluation": {"before": False, "lengths": "1024", "depths": [0.5], "samples": 1, "windows": 0},
        "output": str(study.adapter(cell)),
    }
    finetune(from_dict(RecipeOptions, options), command=command())
    return {"rows": LORA_ROWS, "tokens": LORA_ROWS * cell.length}


MEASURES: dict[str, Callable[[Study, Cell], dict[str, Any]]] = {
    "text": text,
    "code": text,
    "wiki": wiki,
    "passkey": prompts,
    "niah_multikey_2": prompts,
    "json_kv": prompts,
    "heads": heads,
    "caches": caches,
    "positions": positions,
    "pair_bits": pair_bits,
    "key_bias": key_bias,
    "one_pass": one_pass,
    "published": published,
    "train": train,
}

# --- running and reporting


def expected_minutes(cell: Cell, done: dict[Cell, dict[str, Any]]) -> float:
    """Return the minutes that a cell is expected to take, by the speed of finished ones like it."""
    finished = [each for each in done if each[:2] == cell[:2]]
    finished = [each for each in finished if each.length == cell.length] or finished
    if not finished:
        return cell.tokens / 500 / 60
    return cell.tokens * sum(done[each]["seconds"] for each in finished) / sum(each.tokens for each in finished) / 60


def run(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure a cell."""
    study.parts(cell).parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    result = MEASURES[cell.kind](study, cell)
    return {**cell._asdict(), "seconds": round(time.perf_counter() - began, 1), **result}


def report_of(done: dict[Cell, dict[str, Any]], cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the report of the cells that are done, in the order of all cells."""
    return {
        "benchmark": "study_families",
        "command": command(),
        "what": "rotary tables on SmolLM2-135M-Instruct, Gemma 3 270M and Qwen2.5-Coder-Instruct, with weights of GGUF "
        "files",
        "unfinished": [cell.name for cell in cells if cell not in done],
        "minutes": round(sum(each["seconds"] for each in done.values()) / 60, 1),
        "environment": environment(threads=torch.get_num_threads()),
        "cells": [done[cell] for cell in cells if cell in done],
    }


def main() -> None:
    """Measure the cells that are asked for and not finished, and report all that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, default=Path("novels"), help="a folder of text files (%(default)s)")
    wikitext = Path("wikitext2_test.txt")
    parser.add_argument("--wikitext", type=Path, default=wikitext, help="the test part of WikiText-2 (%(default)s)")
    parser.add_argument("--cells", nargs="*", default=["*"], help="names of cells, with * for any text (all)")
    parser.add_argument("--list", action="store_true", help="show the cells, with expected minutes, and stop")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON report, which goes on if it exists")
    args = parser.parse_args()
    study = Study(args.novels, args.wikitext, BUILD / "study_families")
    cells = list(dict.fromkeys(all_cells()))
    done = finished_cells(Cell, args.output)
    chosen = chosen_cells(cells, args.cells)
    if args.list:
        for cell in chosen:
            print("finished" if cell in done else f"{expected_minutes(cell, done):5.1f} min", cell.name)
        return
    for cell in chosen:
        if cell not in done:
            print(f"{cell.name}: about {expected_minutes(cell, done):.1f} minutes", flush=True)
            done[cell] = run(study, cell)
            write(report_of(done, cells), args.output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
