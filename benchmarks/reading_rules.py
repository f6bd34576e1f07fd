"""Compare what ``rope-patch doctor`` says that a program computes with what the program's own code computes.

    PYTHONPATH=VLLM_AND_ITS_PACKAGES python benchmarks/reading_rules.py vllm
    PYTHONPATH=SGLANG_AND_ITS_PACKAGES_AND_TRANSFORMERS_5.19 python benchmarks/reading_rules.py sglang
    python benchmarks/reading_rules.py transformers-4 --python ENVIRONMENT_WITH_4.57.1/bin/python
    python benchmarks/reading_rules.py mlx --python ENVIRONMENT_WITH_MLX_LM/bin/python
    python benchmarks/reading_rules.py llama.cpp --python THE_SAME --sources FOLDER_OF_LLAMA_CPP

For small random checkpoints of every family, folders are prepared: patched by every method as ``rope-patch apply``
writes them, exported, and configs as others write them (keys of transformers 5 alone, of version 4 alone, YaRN with
every key that states its factor, scaled sliding layers). A rule is right where the program builds the table that it
says, to 1e-5, or refuses what it says the program refuses. vLLM's and SGLang's code is run as ``engine_code.py`` says,
transformers 4 and MLX in environments of their own; MLX's models are built, and turn a vector. Of llama.cpp the
converter is run, beside the transformers 4 that it asks for, and the keys that it writes are read as
``llama-context.cpp`` reads them, by hand. Each run replaces its program's part of the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).resolve().parent


def older_tables(root: Path) -> dict[str, Any]:
    """Return the tables that this release of transformers builds from every folder; this imports nothing of ours."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity(logging.CRITICAL)
    tables_by_folder: dict[str, Any] = {"version": transformers.__version__}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("cpu"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:
            tables_by_folder[folder.name] = f"{type(error).__name__}: {error}"
            continue
        tables = {}
        for name, module in model.named_modules():
            if hasattr(module, "original_inv_freq") and "vision" not in name:
                local = "sliding" in name or name.endswith("local")
                tables["sliding_attention" if local else "full_attention"] = (
                    module.inv_freq.tolist(),
                    float(module.attention_scaling),
                )
        tables_by_folder[folder.name] = tables
    return tables_by_folder


def mlx_tables(root: Path) -> dict[str, Any]:
    """Return the frequencies and the factor of every layer of mlx-lm's models; imports nothing of ours."""
    import mlx.core as mx
    from mlx_lm.utils import _get_classes, load_config

    layers_by_folder: dict[str, Any] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            config = load_config(folder)
            model_class, arguments = _get_classes(config)
            model = model_class(arguments.from_dict(config))
            layers_by_folder[folder.name] = [
                _turned(mx, next(module for name, module in layer.named_modules() if name.endswith("rope")))
                for layer in model.layers
            ]
        except Exception as error:
            layers_by_folder[folder.name] = f"{type(error).__name__}: {error}"
    return layers_by_folder


def _turned(mx: Any, rope: Any) -> tuple[list[float], float]:
    """Return the frequencies and the factor by which a rotary module of MLX turns a vector at position 1."""
    pairs = getattr(rope, "dims", None) or rope.dim
    pairs //= 2
    vector = mx.concatenate([mx.ones(pairs), mx.zeros(pairs)])[None, None, None]
    cos, sin = rope(vector, offset=1).squeeze().split(2)
    return mx.arctan2(sin, cos).tolist(), float(mx.sqrt(cos * cos + sin * sin).max())


def folders(root: Path, families: Iterable[str] = ()) -> Iterator[Path]:
    """Write the folders that are read, of all families or of some, and yield each."""
    import engine_tables

    for family in families or engine_tables.FAMILIES:
        for folder in _of_family(family, root):
            yield folder
            if family in MULTIMODAL:
                outer, architecture = MULTIMODAL[family]
                text = json.loads((folder / "config.json").read_text())
                text.pop("rope_patch", None)  # which names the modules of the text model
                whole = {"model_type": outer, "architectures": [architecture], "text_config": text, **VISION}
                yield _written(root / folder.name.replace(family, outer), whole)


MULTIMODAL = {
    "gemma3_text": ("gemma3", "Gemma3ForConditionalGeneration"),
    "gemma4_text": ("gemma4", "Gemma4ForConditionalGeneration"),
}
"""The model type and the architecture of the multimodal checkpoints that hold text models of a family."""
VISION = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
}


def _of_family(family: str, root: Path) -> Iterator[Path]:
    """Write the folders of a family, and yield each."""
    import engine_tables
    from rope_patch.checkpoints.folder_patch import patch_folder
    from rope_patch.engines import export

    base = engine_tables.checkpoint(family, root / f"{family}-base")
    yield base
    methods = engine_tables.METHODS[:-1] if family in ("llama", "gemma3_text") else engine_tables.METHODS[:-1:3]
    for number, name in enumerate(methods):
        try:
            method = engine_tables.method_of(name, base)
            patch_folder(base, method, root / f"{family}-{number}", target_length=engine_tables.TARGET)
            yield root / f"{family}-{number}"
            if number % 3 == 1:
                for to in ("vllm",):
                    out = root / f"{family}-{number}-{to}"
                    export(base, out, to=to, method=method, target_length=engine_tables.TARGET)
                    yield out
        except ValueError:
            continue
    for name, change in changes(family).items() if family != "gemma4_text" else ():
        config = json.loads((base / "config.json").read_text())
        yield _written(root / f"{family}-{name}", change(config))


def changes(family: str) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Return functions by name that change a config to what others write."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    lists = [2.0] * (32 // {"phi": 2, "stablelm": 4, "gpt_neox": 4}.get(family, 1))
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds = {
        "yarn": yarn,
        "yarn-factor": yarn | {"attention_factor": 1.5},
        "yarn-mscale": yarn | {"mscale": 0.7, "mscale_all_dim": 0.5},
        "yarn-attn": yarn | {"attn_factor": 1.25},
        "yarn-ramp": yarn | {"truncate": False, "beta_fast": 16.0},
        "yarn-half": yarn | {"extrapolation_factor": 0.5},
        "yarn-short": yarn | {"factor": 2.0},
        "yarn-unset": {"rope_type": "yarn", "factor": 3.7},
        "yarn-two-names": yarn | {"type": "linear"},
        "longrope": {"rope_type": "longrope", "short_factor": lists, "long_factor": lists},
        "leftover": {"rope_type": "default", "factor": 2.0},
        "llama3-unset": llama3,
        "llama3": llama3 | {"original_max_position_embeddings": 128},
        "linear": {"rope_type": "linear", "factor": 2.0},
        "linear-whole": {"rope_type": "linear", "factor": 5},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    nested = family in ("gemma3_text", "olmo3")

    def newer(scaling: dict[str, Any], both: bool = False) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def change(config: dict[str, Any]) -> dict[str, Any]:
            stated = config["rope_parameters"]
            if nested:
                chosen = ("full_attention", "sliding_attention") if both else ("full_attention",)
                stated = stated | {kind: stated[kind] | scaling for kind in chosen}
            else:
                stated = stated | scaling
            return config | {"rope_parameters": stated, "max_position_embeddings": 1024}

        return change

    def older(scaling: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def change(config: dict[str, Any]) -> dict[str, Any]:
            del config["rope_parameters"]
            return config | {"rope_theta": 50000.0, "rope_scaling": scaling, "max_position_embeddings": 1024}

        return change

    configs = {f"{name}-5": newer(scaling) for name, scaling in kinds.items()}
    if family in ("phi", "stablelm"):
        configs["share-5"] = newer({"partial_rotary_factor": 0.75})
    configs |= {f"{name}-4": older(scaling) for name, scaling in kinds.items() if name != "proportional"}
    if family in ("llama", "mistral", "phi3", "qwen2"):
        kept = newer({"rope_type": "proportional", "partial_rotary_factor": 0.5})
        configs["share-inside-5"] = newer(yarn | {"partial_rotary_factor": 0.5})
        configs["share-outside-5"] = lambda config: kept(config) | {"partial_rotary_factor": 0.5}
    if nested:
        configs["both-5"] = newer(yarn, both=True)
    if family == "olmo3":  # one base for all layers, as in the published config.json
        configs["both-names-5"] = lambda config: newer(yarn)(config) | {"rope_theta": 10000.0, "rope_scaling": yarn}
        configs["one-for-all-5"] = lambda config: config | {"rope_parameters": yarn | {"rope_theta": 50000.0}}
    if family in ("llama", "qwen2", "olmo3"):
        for keys in (("seq_length",), ("max_seq_len", "max_sequence_length"), ("seq_length", "model_max_length")):
            lengths = {key: 768 + 512 * number for number, key in enumerate(keys)}
            for name, change in {"yarn": older(yarn), "linear": older(kinds["linear"])}.items():
                configs[f"{name}-{'-'.join(keys)}-4"] = partial(_with_lengths, change, lengths)
    return configs


def _with_lengths(
    change: Callable[[dict[str, Any]], dict[str, Any]], lengths: dict[str, int], config: dict[str, Any]
) -> dict[str, Any]:
    return change(config) | lengths


def _written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_tables_of(program: str, folder: Path, context: int) -> dict[str | None, Any]:
    """Return cos and sin as vLLM or SGLang looks them up."""
    import engine_code

    return dict(engine_code.tables("sglang" if program == "sglang" else "vllm", folder, context))


def converted_keys(root: Path, sources: Path) -> dict[str, Any]:
    """Return the keys and factors that llama.cpp's converter writes for every folder; this imports nothing of ours."""
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import gguf
    from conversion import ModelBase, get_model_class
    from transformers import __version__

    tables_by_folder: dict[str, Any] = {"version": __version__}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            hparams = ModelBase.load_hparams(folder, False)
            converter = get_model_class(hparams["architectures"][0])
            model = converter(folder, gguf.LlamaFileType.ALL_F32, root / "none.gguf")
            model.set_gguf_parameters()
            factors = [tensor.tolist() for _, tensor in model.generate_extra_tensors()]
        except Exception as error:
            tables_by_folder[folder.name] = f"{type(error).__name__}: {error}"
            continue
        keys = {name: part.value for keys in model.gguf_writer.kv_data for name, part in keys.items()}
        named = {name.partition(".")[2]: value for name, value in keys.items() if ".rope." in name}
        tables_by_folder[folder.name] = named | {"factors": factors[-1] if factors else None}
    return tables_by_folder


def in_engine(keys: dict[str, Any], pairs: int) -> tuple[Any, float]:
    """Return the table of full attention that llama.cpp computes from a file's keys, as ``llama-context.cpp`` reads."""
    import torch

    from rope_patch import frequencies

    theta, factor = keys.get("rope.freq_base", 10000.0), keys.get("rope.scaling.factor") or 1.0
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    if keys.get("rope.scaling.type") == "yarn":  # of yarn_* in the file, the loaders of these families read nothing
        table = frequencies.yarn(theta, 2 * pairs, factor=factor, context=keys["rope.scaling.original_context_length"])
        return table, attention * frequencies.yarn_scaling(factor)
    table = frequencies.geometric(theta, 2 * pairs) / factor
    return table if keys["factors"] is None else table / torch.tensor(keys["factors"]), attention


def verdict(program: str, folder: Path, read_there: dict[str, Any]) -> dict[str, Any]:
    """Compare a rule of `rope-patch doctor` with the program on one folder."""
    import torch

    from rope_patch.engines.compare_programs import compare_programs

    try:
        rows = [row for row in compare_programs(folder, [program]).rows if row.program == program]
    except ValueError as error:  # transformers 5 has no table to compare with
        return {"verdict": "not read by transformers 5", "reason": _named(error, folder)}
    if rows[0].verdict == "unverified":
        return {"verdict": "unverified"}
    said = rows[0].verdict
    try:
        worst, compared = 0.0, False
        if program in ("transformers-4", "llama.cpp", "mlx"):
            theirs = read_there[folder.name]
            if isinstance(theirs, str):
                raise RuntimeError(theirs)
        context = context_of(program, folder) if program in ("vllm", "sglang") else 0
        for row in rows:
            if row.built is None:
                continue
            ours, scaling = row.built.inv_freq, row.built.attention_scaling
            if program == "transformers-4":
                numbers, factor = theirs[row.layer_type or "full_attention"]
                other = torch.tensor(numbers)
            elif program == "mlx":
                # Every layer agrees; or one of a type has the table that a rule gives, where layers of a type differ.
                chosen = max if said == "agrees" else min
                numbers, factor = chosen(
                    (theirs[layer] for layer in row.layers), key=lambda table: _apart(table[0], ours.tolist())
                )
                other = torch.tensor(numbers)
            elif program == "llama.cpp":
                keys = theirs
                if row.layer_type == "sliding_attention":  # a file states nothing but the base of these layers
                    own = theirs.get("rope.freq_base_swa")
                    own = own or (theirs["rope.freq_base"] if folder.name.startswith("olmo3") else 10000.0)
                    keys = {"factors": None, "rope.freq_base": own}
                other, factor = in_engine(keys, len(ours))
            else:
                length = min(row.built.positions or 256, 256)
                tables = engine_tables_of(program, folder, length)
                cos_sin = tables[row.layer_type] if row.layer_type in tables else tables[None]
                angles = torch.arange(length).float()[:, None] * ours
                expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling
                worst = max(worst, float((cos_sin - expected).abs().max()))
                compared = True
                check_lengths(program, folder, context, row.built)
                continue
            if other.shape != ours.shape:
                raise ValueError(f"WRONG: {len(other)} pairs, the rule says {len(ours)}")
            off = ((other - ours).abs() / torch.maximum(other, ours).clamp_min(1e-20)).max()
            worst, compared = max(worst, float(off), abs(factor - scaling)), True
        if program in ("vllm", "sglang") and not compared:
            engine_tables_of(program, folder, 1)
            return {"verdict": "WRONG", "reason": "it reads what the rule says it refuses"}
        if not compared:
            return {"verdict": "WRONG", "reason": "it reads what the rule says it refuses"}
    except Exception as error:  # a program may raise anything; its message is the result
        reason = _named(error, folder)
        return {"verdict": "equal" if said == "refuses" and "WRONG" not in reason else "WRONG", "reason": reason}
    return {"verdict": "equal" if worst <= 1e-5 else "WRONG", "difference": worst, "said": said}


def _apart(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two frequencies; inf where there are more of one."""
    return max(map(abs, map(float.__sub__, one, other))) if len(one) == len(other) else float("inf")


def check_lengths(program: str, folder: Path, context: int, built: Any) -> None:
    """Raise unless an engine derives the context that the rule states, and holds no more positions."""
    if context != built.context:
        raise ValueError(f"WRONG: a context of {context}, the rule says {built.context}")
    if built.positions is None:
        return
    with contextlib.suppress(IndexError):
        engine_tables_of(program, folder, built.positions + 1)
        raise ValueError(f"WRONG: it holds more than {built.positions} positions")


def context_of(program: str, folder: Path) -> int:
    """Return the context that an engine derives; call it before a layer is built, which changes SGLang's config."""
    import engine_code

    return int((engine_code.longest_of_sglang if program == "sglang" else engine_code.longest)(folder))


def _named(error: Exception, folder: Path) -> str:
    """Return an error in a line, without the scratch folder of this run."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".replace(f"{folder.parent}/", "")[:160]


def main() -> None:
    """Compare one program's rules, and put the result into the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?")
    parser.add_argument("--python", type=Path, help="of an environment with transformers 4.57.1, or mlx-lm")
    parser.add_argument("--sources", type=Path, help="a checkout of llama.cpp")
    parser.add_argument(
        "--families", nargs="*", default=(), help="whose rows replace those of the report; by default all"
    )
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "reading_rules.json")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        if given.program == "mlx":
            read = mlx_tables(given.read)
        else:
            read = older_tables(given.read) if given.sources is None else converted_keys(given.read, given.sources)
        print(json.dumps(read))
        return
    from transformers.utils import logging

    from measuring import environment
    from rope_patch.engines.tables_by_program import PROGRAMS

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    program, older = str(given.program), {}
    with tempfile.TemporaryDirectory() as scratch:
        written = list(folders(Path(scratch), given.families))
        if given.python is not None:
            asked = [given.python, __file__, program, "--read", scratch]
            asked += [] if given.sources is None else ["--sources", given.sources]
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
            older = json.loads(done.stdout.splitlines()[-1])
        rows = {folder.name: verdict(program, folder, older) for folder in written}
    counts = Counter(row["verdict"] for row in rows.values())
    print(program, dict(counts))
    for name, row in rows.items():
        if row["verdict"] == "WRONG":
            print("  ", name, row)
    report = json.loads(given.output.read_text()) if given.output.exists() else {}
    versions = {name: environment()[name] for name in ("transformers", "torch", "rope_patch")}
    if given.families:
        rows = report[program]["rows"] | rows
        counts = Counter(row["verdict"] for row in rows.values())
    report[program] = {"version": PROGRAMS[program].version, "environment": versions, "counts": counts, "rows": rows}
    given.output.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
