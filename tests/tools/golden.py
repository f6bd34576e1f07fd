"""The golden record: the numbers that rebuilding this package must not change.

    python tests/tools/golden.py                       # measure this tree and compare it with the committed record
    python tests/tools/golden.py --against COMMIT      # measure this tree and a commit side by side, and compare them
    python tests/tools/golden.py --only tables,gguf    # some of the probes
    python tests/tools/golden.py --write               # measure, and write the record anew

The exit status is 0 where all numbers are equal and 1 where they are not. Hashes and whole numbers are compared
exactly. Other numbers are compared exactly too where both sides were measured in this call; against the committed
record, which another processor may have measured, they may differ by ``--tolerance``.

A probe is a function that returns numbers by name. Probes use the public names and the commands, and pick what matters
out of what those return, so that a key of a JSON file that gets another name is one line here. A commit that has a
file of this name is measured by its own, any other commit by this one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import math
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".json")
ABSENT = "absent"  # stands for the numbers of a checkpoint that is not on this machine
Numbers = dict[str, Any]

# --- what is measured: models, methods, tasks, formats


def _shape(
    family: str = "llama", size: int = 64, theta: float = 1e4, context: int = 4096, rope: Any = (), **more: Any
) -> tuple[str, Numbers, Numbers]:
    """Return the family, the config and the options of ``apply`` of a tiny model whose heads have ``size`` features."""
    options = {name: more.pop(name) for name in ("freeze_at", "types") if name in more}
    if "types" in options:
        more |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
        options["layer_types"] = [f"{kind}_attention" for kind in options.pop("types").split()]
    config = {"vocab_size": 32, "hidden_size": 2 * size, "intermediate_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "head_dim": size}
    config |= {"max_position_embeddings": context, **more}
    if rope is not None:  # None keeps the family's own tables
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **dict(rope)}
    return family, config, options


def _llama3(factor: float) -> Numbers:
    smoothing = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **smoothing}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]}
HALF = {"partial_rotary_factor": 0.5}
QUARTER = {"partial_rotary_factor": 0.25}
GEMMA4 = {"global_head_dim": 32, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 32}
SHAPES = {
    **{f"llama-{size}": _shape(size=size) for size in (8, 16, 32, 64, 80, 96, 128, 256)},
    "llama-1e5": _shape(theta=1e5, context=8192),
    "llama-150000": _shape(theta=150000.0),
    "llama-5e5": _shape(size=128, theta=5e5, context=8192),
    "llama-5e6": _shape(size=128, theta=5e6, context=204800),
    "llama-1e7": _shape(size=128, theta=1e7, context=1048576),
    "llama-5e7": _shape(size=128, theta=5e7, context=256),
    "llama3-64": _shape(theta=5e5, context=131072, rope=_llama3(32.0)),
    "llama3-128": _shape(size=128, theta=5e5, context=131072, rope=_llama3(8.0)),
    "llama-yarn": _shape(size=128, context=16384, rope=YARN),
    "llama-linear": _shape(context=8192, rope={"rope_type": "linear", "factor": 2.0}),
    "llama-dynamic": _shape(rope={"rope_type": "dynamic", "factor": 4.0}, freeze_at=8192),
    "mistral": _shape("mistral", 128, context=32768, sliding_window=4096),
    "mistral-1e6": _shape("mistral", 128, 1e6, 32768),
    "qwen2": _shape("qwen2", 64, 1e6, 32768),
    "qwen3": _shape("qwen3", 128, 1e6, 40960),
    "phi3": _shape("phi3", 96, original_max_position_embeddings=4096),
    "phi3-longrope": _shape("phi3", 96, 1e4, 32768, LONGROPE, freeze_at=32768, original_max_position_embeddings=4096),
    "phi-partial": _shape("phi", 32, rope=HALF),
    "stablelm-partial": _shape("stablelm", rope=QUARTER),
    "gpt_neox-partial": _shape("gpt_neox", rope=QUARTER),
    "olmo2": _shape("olmo2", 128, 5e5),
    "gemma": _shape("gemma", 256, context=8192),
    "gemma2": _shape("gemma2", 256, context=8192, sliding_window=16),
    "gemma3": _shape("gemma3_text", 256, 1e6, 32768, types="full"),
    "gemma3-sliding": _shape("gemma3_text", 256, 1e6, 32768, types="sliding"),
    "gemma3-both": _shape("gemma3_text", types="sliding full"),
    "gemma4": _shape("gemma4_text", 16, rope=None, types="full", **GEMMA4),
}

FORMS = """
default  nope  nope:factor=4:temperature=0.4  nope:factor=8:temperature=0.1
p_rope:p=0  p_rope:p=0.25  p_rope:p=0.5  p_rope:p=0.75  p_rope:p=1
p_rope_reversed:p=0.25  p_rope_reversed:p=0.5  p_rope_reversed:p=0.75
partial:p=0.25  partial:p=0.5  partial:p=0.75
abf:rope_theta=500000  abf:rope_theta=2e7  abf:factor=8  abf:factor=50
ntk:factor=2.5  ntk:factor=8  pi:factor=2.5  pi:factor=8
yarn:factor=2  yarn:factor=8  yarn:factor=8:truncate=false
yarn:factor=8:beta_fast=16  yarn:factor=8:beta_slow=2  yarn:factor=8:attention_factor=1.5
yarn:factor=8:original_max_position_embeddings=2048  yarn:factor=40:mscale=1:mscale_all_dim=0.7
mrrope:factor=2  mrrope:factor=8  mrrope:factor=27:beta_fast=300
mrrope:factor=8:beta_slow=2  mrrope:factor=8:attention_factor=1.5  mrrope:factor=8:original_max_position_embeddings=2048
llama3:factor=2  llama3:factor=8  llama3:factor=8:low_freq_factor=2
llama3:factor=8:high_freq_factor=8  llama3:factor=4:original_max_position_embeddings=512
truncated  truncated:context=100  truncated:context=2000
truncated:cutoff_low=0.005:cutoff_high=0.05:floor=0.02  truncated:cutoff_low=0.01:cutoff_high=0.1
ntk:factor=4+p_rope:p=0.5  pi:factor=2+truncated
llama3:factor=4+p_rope:p=0.75  p_rope:p=0.5+yarn:factor=4
"""
TO_TARGET = ("ntk", "pi", "yarn", "mrrope", "llama3")  # their factor follows from the target

RELOADED = ("default", "nope", "p_rope:p=0.5", "abf:factor=50", "ntk:factor=4", "pi:factor=4", "yarn:factor=4")
RELOADED += ("mrrope:factor=4", "llama3:factor=4", "truncated", "yarn:factor=4+p_rope:p=0.5")
IN_BFLOAT16 = ("p_rope:p=0.5", "yarn:factor=4", "mrrope:factor=4")
PREPARED = ("default", "abf:factor=50", "pi:factor=4", "yarn:factor=4", "p_rope:p=0.5", "mrrope:factor=4")
IN_GGUF = ("abf:factor=8", "yarn:factor=4", "p_rope:p=0.5", "pi:factor=4")
TASKS = "passkey niah niah_single_1 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multiquery fwe json_kv sums"
FORMATS = "kivi-2 llama.cpp:q4_0 int4-token fp8"
HARNESS_TASKS = "rope_passkey,rope_niah_single_1,rope_ppl"

# --- what the probes share


def _assets(name: str) -> Path:
    import rope_patch

    return rope_patch.data_path("assets") / name


def _digest(*parts: bytes) -> str:
    """Return twelve hex digits of a hash of bytes: enough to notice a change, and few enough to review."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def _sum(values: Any) -> float:
    return float(values.detach().double().sum())


def _pick(values: Mapping[str, Any], names: str) -> Numbers:
    return {name: values[name] for name in names.split()}


def _command(*words: object, entry: str = "rope-patch") -> str:
    """Return the output of a command that is run from the tree that this process imports.

    An installed script would run the tree that was installed, so the entry point is read from the tree's project file.
    """
    import rope_patch

    tree = Path(cast(str, rope_patch.__file__)).parents[1]
    target = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]["scripts"][entry]
    program = (
        "import importlib, sys, rope_patch; tree, target, *sys.argv = sys.argv[1:]; "
        "assert rope_patch.__file__.startswith(tree), rope_patch.__file__; "
        "module, name = target.split(':'); sys.exit(getattr(importlib.import_module(module), name)())"
    )
    # The program checks that it really imports that tree.
    run = [sys.executable, "-c", program, f"{tree}{os.sep}", target, entry, *map(str, words)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{entry} {words[0]} ended with status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def _printed(*words: object) -> Any:
    return json.loads(_command(*words, "--json"))


# --- the probes: each takes an empty folder


def tables(scratch: Path) -> Numbers:
    """Apply every method to every shape: hash of the tables, their type, and hash of the config's settings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    results: Numbers = {}
    for name, (family, config, options) in SHAPES.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        results[name] = _tables_of(model, options)
    return results


def _tables_of(model: Any, options: Mapping[str, Any]) -> Numbers:
    import rope_patch

    chosen = options.get("layer_types") or ["full_attention"]
    found = [table for table in rope_patch.inspect(model).tables if table.layer_type in (None, *chosen)]
    pairs = len(found[0].inv_freq)
    context = model.config.max_position_embeddings
    rising = "/".join(f"{1 + i / 4:g}" for i in range(pairs))
    falling = "/".join(f"{2.0**-i:g}" for i in range(pairs))
    forms: dict[str, tuple[str, Numbers]] = {form: (form, {}) for form in FORMS.split()}
    forms |= {f"{form} to 4 times the context": (form, {"target_length": 4 * context}) for form in TO_TARGET}
    forms |= {f"longrope{more}": (f"longrope:factors={rising}{more}", {}) for more in ("", ":attention_factor=1.5")}
    forms |= {"longrope:factor=4": (f"longrope:factors={rising}:factor=4", {})}
    forms |= {f"table{more}": (f"table:values={falling}{more}", {}) for more in ("", ":attention_scaling=1.25")}
    return {name: _table(model, form, {**options, **more}) for name, (form, more) in forms.items()}


def _table(model: Any, method: str, options: Mapping[str, Any]) -> str:
    """Return hash, types and hash of the config under a method, or the class of the error if it is refused."""
    import rope_patch

    try:
        with rope_patch.patched(model, method, **options) as patch:
            after = sorted(patch.after.items(), key=str)
            numbers = [t.inv_freq.float().numpy().tobytes() + struct.pack("<d", t.attention_scaling) for _, t in after]
            said = [model.config.rope_parameters, model.config.max_position_embeddings]
            types = "/".join(table.rope_type for _, table in after)
            return f"{_digest(*numbers)} {types} {_digest(json.dumps(said, sort_keys=True).encode())}"
    except ValueError as error:
        return type(error).__name__


PLAIN = """
import json, sys
sys.modules["rope_patch"] = None  # importing it would fail
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
results = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    stored = load_file(f"{folder}/golden.safetensors")
    with torch.no_grad():
        logits = model(stored["ids"], use_cache=False).logits
    apart = (logits - stored["logits"]).abs().max().item()
    some = logits[0, ::97, 5].double()
    results[folder] = {"sum": logits.double().sum().item(), "absolute": logits.double().abs().sum().item(),
                       "best": logits.argmax(-1).sum().item(), "some": some.tolist(), "apart": apart}
print(json.dumps(results))
"""


def logits(scratch: Path) -> Numbers:
    """Compute logits of patched models, one with a merged adapter, that were saved and loaded by plain transformers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    import rope_patch

    ids = torch.randint(3, 1024, (1, 512), generator=torch.Generator().manual_seed(0))
    folders: dict[str, Path] = {}

    def keep(name: str, model: Any) -> None:
        folders[name] = scratch / name.translate(str.maketrans(" :=+.", "-----"))
        rope_patch.save(model, folders[name])
        with torch.no_grad():
            stored = {"ids": ids, "logits": model(ids, use_cache=False).logits}
        save_file(stored, folders[name] / "golden.safetensors")

    cases = [(method, "float32") for method in RELOADED] + [(method, "bfloat16") for method in IN_BFLOAT16]
    for source in ("llama", "gemma3"):
        for method, dtype in cases:
            model = AutoModelForCausalLM.from_pretrained(_assets(source), dtype=dtype).eval()
            rope_patch.apply(model, method)
            rope_patch.verify(model)
            keep(f"{source} {method} {dtype}", model)
        model = AutoModelForCausalLM.from_pretrained(_assets(source), dtype="float32").eval()
        rope_patch.apply(model, "yarn:factor=4", target_length=1024)
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
        rope_patch.save(adapted, scratch / f"{source}-adapter")
        merged = rope_patch.load(scratch / f"{source}-adapter", dtype="float32").eval().merge_and_unload()
        keep(f"{source} yarn:factor=4 merged adapter", merged)
    plain = [sys.executable, "-c", PLAIN, *map(str, folders.values())]
    answers = json.loads(subprocess.run(plain, check=True, capture_output=True, text=True).stdout)
    return {name: answers[str(folder)] for name, folder in folders.items()}


def demo(scratch: Path) -> Numbers:
    """Run `rope-patch demo`: its measurements and its choice."""
    _command("demo", "--quick", "--threads", 1, "-o", scratch / "demo")
    report = json.loads((scratch / "demo" / "rope_patch_extend.json").read_text("utf-8"))
    return {
        **_pick(report, "chosen trained_length length"),
        "evaluated": {row["method"]: _pick(row, "answered perplexity change") for row in report["evaluated"]},
        "rounds": [_compared(measured) for measured in report["rounds"]],
    }


def compare(scratch: Path) -> Numbers:
    """Compare three methods by position, length and depth, and run every task without a patch."""
    shared = ("--samples", 1, "--no-report", "--dtype", "float32", "--threads", 1)
    small = (*shared, "--lengths", "256 1k", "--windows", 4, "--methods", "default yarn:factor=4 p_rope:p=0.5")
    words = (*shared, "--lengths", "1k", "--depths", "0.2 0.7", "--windows", 4, "--methods", "default")
    words += ("--tasks", TASKS, "--haystack", "builtin")
    results = {
        name: _compared(_printed("compare", _assets(name), *small, "-o", scratch / name))
        for name in ("llama", "gemma3")
    }
    return {
        **results,
        "tasks": _compared(_printed("compare", _assets("llama"), *words, "-o", scratch / "tasks")),
    }


def _compared(report: Mapping[str, Any]) -> Numbers:
    results: Numbers = {}
    for row in report["rows"]:
        score = row["perplexity"]
        numbers = _pick(score, "nll tokens bits_per_byte")
        numbers["buckets"] = {f"{one['start']}-{one['stop']}": one["nll"] for one in score["buckets"]}
        for task, answers in row["retrieval"].items():
            numbers[task] = {
                f"{cell['length']} at {cell['depth']}": [
                    [int(one["correct"]), one["logprob"]] for one in cell["samples"]
                ]
                for cell in answers["cells"]
            }
        results[row["method"]] = numbers
    for column in report["columns"]:
        name = f"{column['metric']} {column['task'] or column['start']} {column['stop']}"
        results[name] = {"values": column["values"], "differences": column["differences"]}
    return results


def analyze(scratch: Path) -> Numbers:
    """Analyze heads, outliers, sinks and the sweep over p."""
    words = ("--p", "0.75 0.5", "--tokens", "4k", "--window", 256, "--no-report", "--dtype", "float32", "--threads", 1)
    return {
        name: _analyzed(_printed("analyze", _assets(name), *words, "-o", scratch / name))
        for name in ("llama", "gemma3")
    }


def _analyzed(report: Mapping[str, Any]) -> Numbers:
    of_head = "first_mass sink_mass induction_mass distance entropy"
    of_p = "query_share key_share logit_share"
    return {
        "heads": {f"{one['layer']}.{one['head']}": [*_pick(one, of_head).values()] for one in report["heads"]},
        "types": {f"{one['layer']}.{one['head']}": " ".join(one["types"]) for one in report["heads"]},
        "outliers": {
            states: {
                "count": len(rows),
                **{name: math.fsum(row[name] for row in rows) for name in ("radius", "ratio", "wavelength")},
            }
            for states, rows in report["outliers"].items()
        },
        "p": {str(one["p"]): _pick(one, of_p) for one in report["p_sweep"]},
    }


def kv_check(scratch: Path) -> Numbers:
    """Check cache formats under two methods: quality, verdicts, attribution, remedies."""
    words = ("--formats", FORMATS, "--lengths", "256 512", "--windows", 2, "--samples", 1, "--no-report")
    words += ("--methods", "default yarn:factor=4", "--dtype", "float32", "--threads", 1)
    results: Numbers = {}
    for name in ("llama", "gemma3"):
        report = _printed("kv-check", _assets(name), *words, "-o", scratch / name)
        results[name] = {f"{row['method']} {row['format']}": _checked(row) for row in report["rows"]}
    return results


def _checked(row: Mapping[str, Any]) -> Numbers:
    attribution = row["attribution"] or {}
    lengths = {}
    for length, one in row["lengths"].items():
        verdict = one.get("verdict") or {}
        lengths[length] = {
            **_pick(one, "cache_bits perplexity retrieval"),
            "nll_change": one.get("nll_change"),
            "verdict": verdict.get("kind"),
        }
    return {
        **_pick(row, "key_bits value_bits bits divergence"),
        "lengths": lengths,
        "attribution": _pick(attribution, "keys layers shares") if attribution else None,
        "remedies": {one["name"]: one["kl"] for one in attribution.get("remedies", [])},
    }


def finetune(scratch: Path) -> Numbers:
    """Run a recipe at its smoke size: losses, scores, and the adapter that it trains."""
    from safetensors.torch import load_file

    import rope_patch

    recipe = rope_patch.data_path("recipes") / "configs" / "first_run.yaml"
    _command("finetune", recipe, "--smoke", "--threads", 1, "patch.method=yarn:factor=4", f"output={scratch / 'run'}")
    report = json.loads((scratch / "run" / "results.json").read_text("utf-8"))
    weights = load_file(scratch / "run" / "adapter_model.safetensors")
    return {
        "losses": {str(one["step"]): one["loss"] for one in report["losses"]},
        **_pick(report, "tokens best_step before after"),
        "adapter": {"tensors": len(weights), "absolute": math.fsum(_sum(one.abs()) for one in weights.values())},
    }


def harness(scratch: Path) -> Numbers:
    """Run the lm-eval plug-in: its scores."""
    model = f"pretrained={_assets('llama')},method=yarn:factor=4,target_length=1024,dtype=float32"
    metadata = ("--metadata", "max_seq_lengths=512", "samples=2", "windows=4")
    words = ("--model_args", model, "--tasks", HARNESS_TASKS, *metadata, "--limit", 4)
    _command(*words, "--output_path", scratch / "scores.json", entry="rope-patch-eval")
    (report,) = scratch.glob("scores*.json")
    results = json.loads(report.read_text("utf-8"))["results"]
    return {
        task: {metric: value for metric, value in scores.items() if isinstance(value, float)}
        for task, scores in results.items()
    }


def gguf(scratch: Path) -> Numbers:
    """Patch a GGUF file of random tensors: hash of its tensors' bytes, and its rotary keys."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    base = scratch / "base.gguf"
    random = np.random.default_rng(0)
    writer = GGUFWriter(base, "llama")
    for name, value in {"context_length": 256, "embedding_length": 64, "block_count": 1, "head_count": 4}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_rope_freq_base(1e4)
    writer.add_tensor("token_embd.weight", random.standard_normal((32, 64)).astype(np.float32))
    weights = quants.quantize(random.standard_normal((64, 64)).astype(np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", weights, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"base": _in_gguf(base)} | {method: _patched_gguf(base, method, scratch) for method in IN_GGUF}


def _patched_gguf(base: Path, method: str, scratch: Path) -> Numbers | str:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        target = ("--target-length", 1024) if "=4" in method else ()
        try:
            _command("apply", base, method, "-o", Path(folder) / "out.gguf", *target)
        except RuntimeError:  # llama.cpp reads no factors for Gemma 3
            return "refused"
        return _in_gguf(Path(folder) / "out.gguf")


def _in_gguf(path: Path) -> Numbers:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    rotary = [name for name in reader.fields if ".rope." in name or name.endswith("context_length")]
    found: dict[str, Any] = {name: cast(Any, reader.fields[name]).contents() for name in rotary}
    apart = {tensor.name: tensor for tensor in reader.tensors}
    factors = apart.pop("rope_freqs.weight", None)
    whole = [f"{one.name} {one.tensor_type} {one.shape}".encode() + one.data.tobytes() for one in apart.values()]
    return {
        **found,
        "tensors": _digest(*whole),
        "rope_freqs": None if factors is None else _digest(factors.data.tobytes()),
    }


def audit(scratch: Path) -> Numbers:
    """Audit folders that were prepared for other programs: the table that each program reads from them."""
    from transformers import AutoModelForCausalLM

    import rope_patch

    results: Numbers = {}
    for source in ("llama", "gemma3"):
        for method in PREPARED if source == "llama" else ("default", "yarn:factor=4"):
            model = AutoModelForCausalLM.from_pretrained(_assets(source), dtype="float32")
            rope_patch.apply(model, method, target_length=1024)
            folder = rope_patch.save(model, scratch / f"{source}{len(results)}")
            results[f"{source} {method}"] = _read_by_programs(folder)
    return results


def _read_by_programs(folder: Path) -> Numbers:
    from rope_patch.engines.compare_programs import compare_programs

    agrees = {"reference": 1, "agrees": 1, "differs": 0}  # a program that refuses, or is not verified, has None
    results: Numbers = {}
    for row in compare_programs(folder).rows:
        results[f"{row.program} {row.layer_type}"] = {"agrees": agrees.get(row.verdict)}
    return results


def export(scratch: Path) -> Numbers:
    """Export to other programs: the settings in the configs of the folders."""
    from transformers import AutoModelForCausalLM

    import rope_patch

    results: Numbers = {}
    for method in ("yarn:factor=4", "mrrope:factor=4", "p_rope:p=0.5"):
        model = AutoModelForCausalLM.from_pretrained(_assets("llama"), dtype="float32")
        rope_patch.apply(model, method, target_length=1024)
        for engine in ("hf", "vllm", "sglang"):
            out = scratch / f"{len(results)}"
            try:
                rope_patch.export(model, out, to=engine)
            except ValueError as error:
                results[f"{engine} {method}"] = type(error).__name__
                continue
            config = json.loads((out / "config.json").read_text("utf-8"))
            said = [
                config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
            ]
            results[f"{engine} {method}"] = _digest(json.dumps(said, sort_keys=True).encode())
    return results


def plan(scratch: Path) -> Numbers:
    """Predict the memory of training steps."""
    import rope_patch

    cases = [
        (name, length) for name in ("Llama-3.1-8B", "Qwen3-8B", "gemma-2-9b", "gemma-3-4b") for length in (8192, 131072)
    ]
    cases += [(str(_assets(name)), 1024) for name in ("llama", "gemma3")]
    return {
        f"{Path(name).name} {length} {more}": float(rope_patch.plan(name, length=length, **more).total)
        for name, length in cases
        for more in ({}, {"quantization": "nf4", "lora_rank": 64})
    }


def checkpoints(scratch: Path) -> Numbers:
    """Patch public checkpoints, if they are on this machine: tables, perplexity, greedy tokens, a GGUF file."""
    at = Path(os.environ["GOLDEN_CHECKPOINTS"])
    results: Numbers = {}
    for name in ("smollm2", "gemma3"):
        folders = sorted(path.parent for path in (at / name).glob("*/config.json"))
        files = sorted((at / name).glob("*.gguf"))
        results[name] = _of_checkpoint(folders[0]) if folders else ABSENT
        results[f"{name} GGUF"] = _patched_gguf(files[0], "abf:factor=8", scratch) if files else ABSENT
    return results


def _of_checkpoint(folder: Path) -> Numbers:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import rope_patch

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval()
    ids = tokenizer((ROOT / "LICENSE").read_text("utf-8"), return_tensors="pt").input_ids[:, :512]
    read: Numbers = {}
    for method in ("default", "yarn:factor=2", "p_rope:p=0.75"):
        with rope_patch.patched(model, method):
            answer = model.generate(ids[:, :64], max_new_tokens=12, do_sample=False)
            read[method] = {"nll": rope_patch.perplexity(model, ids[0]).nll, "greedy": answer[0, 64:].tolist()}
    return {"tables": _tables_of(model, {}), "read": read}


PROBES: dict[str, Callable[[Path], Numbers]] = {
    probe.__name__: probe
    for probe in (tables, logits, demo, compare, analyze, kv_check, finetune, harness, gguf, audit, export, plan)
}
PROBES["checkpoints"] = checkpoints

# --- measuring a tree


def _measure(names: list[str], output: Path) -> None:
    """Run probes in this process, which imports the tree to measure, and write the numbers."""
    results: Numbers = {}
    for name in names:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            try:
                results[name] = PROBES[name](Path(scratch))
            except Exception as error:  # the other probes still give numbers
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            os.chdir(ROOT)
        print(
            f"{os.environ['GOLDEN_TREE']:12} {name:12} {time.perf_counter() - began:6.1f} s",
            file=sys.stderr,
            flush=True,
        )
    versions = {name: metadata.version(name).split("+")[0] for name in ("torch", "transformers", "peft", "lm_eval")}
    report = {"environment": {"python": platform.python_version(), **versions}, **results}
    output.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def script_of(tree: Path) -> Path:
    """Return the script that measures a tree: its own, or else this one."""
    own = tree / "tests/tools/golden.py"
    return own if own.exists() else Path(__file__).resolve()


def _start(tree: Path, label: str, names: list[str], checkpoints: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a process that measures a tree; it and all processes that it starts import from that tree."""
    variables = {"PYTHONPATH": str(tree), "GOLDEN_TREE": label, "GOLDEN_CHECKPOINTS": str(checkpoints)}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, str(script_of(tree)), "--measure", str(tree), "--only", ",".join(names), "-o", str(output)]
    return subprocess.Popen(words, env={**os.environ, **variables})


@contextlib.contextmanager
def _tree_of(commit: str) -> Iterator[Path]:
    """Check out a commit into a folder of its own, which is removed at the end, also after an interruption."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        try:
            subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)


def measure(trees: Mapping[str, Path], names: list[str], checkpoints: Path) -> list[Numbers]:
    """Return the numbers of each tree; the trees are measured at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{i}.json" for i in range(len(trees))]
        started = [
            _start(tree, label, names, checkpoints, output)
            for (label, tree), output in zip(trees.items(), outputs, strict=True)
        ]
        try:
            for process in started:
                if process.wait() != 0:
                    raise SystemExit(f"error: measuring ended with status {process.returncode}")
        finally:
            for process in started:
                # After an error or Ctrl-C the other process must not go on measuring.
                process.terminate()
                process.wait()
        return [json.loads(output.read_text("utf-8")) for output in outputs]


# --- comparing


def leaves(numbers: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every number."""
    if isinstance(numbers, Mapping | list):
        for key, value in numbers.items() if isinstance(numbers, Mapping) else enumerate(numbers):
            yield from leaves(value, f"{path} / {key}" if path else str(key))
    else:
        yield path, numbers


def differences(old: Numbers, new: Numbers, tolerance: float = 0.0) -> tuple[list[str], float]:
    """Return a line for each number that differs, and the largest relative difference within the tolerance.

    Numbers that are absent on one side are not compared.
    """
    before = dict(leaves(old))
    after = dict(leaves(new))
    absent = [path for path in before.keys() | after.keys() if ABSENT in (before.get(path), after.get(path))]
    lines = []
    largest = 0.0
    for path in [*before, *(path for path in after if path not in before)]:
        if any(path == one or path.startswith(f"{one} / ") for one in absent):
            continue
        a = before.get(path, "nothing")
        b = after.get(path, "nothing")
        if isinstance(a, float) and isinstance(b, float):
            apart = 0.0 if a == b or (a != a and b != b) else abs(a - b) / max(abs(a), abs(b))
            if apart <= tolerance:
                largest = max(largest, apart)
            else:
                lines.append(f"{path}: {a!r} -> {b!r} (relative difference {apart:.1e})")
        # With their types, since True equals 1 in Python.
        elif (type(a), a) != (type(b), b):
            lines.append(f"{path}: {a} -> {b}")
    return lines, largest


def report(old: Numbers, new: Numbers, tolerance: float) -> int:
    """Print how two measurements differ, and return the exit status."""
    if (versions := differences(old["environment"], new["environment"])[0]) != []:
        print("measured under other versions, which change numbers by themselves: " + "; ".join(versions))
    names = [name for name in new if name != "environment"]
    for path in sorted({p for side in (old, new) for p, value in leaves(side) if value == ABSENT}):
        print(f"not compared, for it is absent on one side: {path}")
    lines, largest = differences({k: old[k] for k in names if k in old}, {k: new[k] for k in names}, tolerance)
    failed = [f"{path}: {value}" for path, value in leaves(new) if path.endswith(" / failed")]
    print("\n".join([*lines, *failed]))
    count = sum(1 for name in names for _ in leaves(new[name]))
    print(f"{len(lines)} of {count} numbers differ; of the others the largest relative difference is {largest:.1e}")
    return 1 if lines or failed else 0


def main() -> int:
    """Measure this tree, compare it, and print the numbers that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, and compare with it")
    parser.add_argument("--only", default=",".join(PROBES), help="probes, joined by commas: %(default)s")
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "build", help="has smollm2/ and gemma3/, where at hand"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative, against the committed record")
    parser.add_argument("--write", action="store_true", help="write the record; with --only those probes of it")
    parser.add_argument("-o", "--output", type=Path, help="JSON file for what was measured of this tree")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # set for the process that imports a tree
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PROBES]:
        parser.error(f"no probe {', '.join(unknown)}. Known: {', '.join(PROBES)}")
    if args.measure is not None:
        found = Path(cast(str, importlib.import_module("rope_patch").__file__)).resolve()
        if not found.is_relative_to(args.measure.resolve()):
            raise SystemExit(f"error: rope_patch was imported from {found}, not from {args.measure}")
        _measure(names, args.output)
        return 0
    with _tree_of(args.against) if args.against else contextlib.nullcontext() as other:
        trees = {"this tree": ROOT} | ({args.against: other} if other else {})
        new, *others = measure(trees, names, args.checkpoints.resolve())
    if args.output is not None:
        args.output.write_text(json.dumps(new, indent=1) + "\n", "utf-8")
    old = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    if args.write:
        RECORD.write_text(json.dumps({**old, **new}, indent=1) + "\n", "utf-8")
        return 0
    return report(others[0], new, 0.0) if others else report(old, new, args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
