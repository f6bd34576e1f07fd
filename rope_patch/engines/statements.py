"""What people write into their own configuration, so that a program runs an unchanged checkpoint under a method.

Trainers and libraries build the model by transformers, so the keys are those of its config; how a program takes keys,
and what it makes of them, was read in its source at the version that the statement names. vLLM, SGLang and llama.cpp
have :mod:`~rope_patch.engines.flags`.

- axolotl 0.18.0, 067b021c: ``loaders/utils.py`` sets each key of ``overrides_of_model_config``.
- LLaMA-Factory 0.9.6, ff6d4d12: ``model_utils/rope.py`` makes a dictionary of its own, without the base.
- ms-swift 4.6.0, 3602360a: ``_init_rope_scaling`` fills what is missing, ``_postprocess_config`` sets ``rope_scaling``.
- verl 0.10.0, 1dda039b: ``utils/model.py``, ``update_model_config`` descends into dictionaries, and fails on them.
- TRL 1.16.0: ``model_init_kwargs`` go to ``from_pretrained``, and ``SFTTrainer`` was run with them; TRL's own commands
  replace them.
- mlx-lm 0.32.0, d78bf58e: ``load`` takes ``model_config``, of which a family keeps the keys that it declares.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rope_patch.checkpoints.source_files import config_json
from rope_patch.engines.flags import ENGINES, Flags, PatchedCheckpoint, checkpoint_under
from rope_patch.engines.programs import UNVERIFIED
from rope_patch.methods import MethodLike
from rope_patch.patching.older_keys import OLDER_FAIL, older_keys
from rope_patch.runtime.folders import is_gguf


def settings(
    model: str | Path,
    method: MethodLike,
    *,
    target_length: int | None = None,
    layer_types: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the keys with which ``from_pretrained`` loads an unchanged checkpoint under a method.

    They are complete: transformers 5 replaces all rotary settings by those that it is given, and fails on settings
    without a base. Only the config of the checkpoint is read.

    Args:
        model: the folder or hub id of a checkpoint.
        method: the method, in any form that :func:`rope_patch.apply` takes.
        target_length: the context that the method is made for [tokens].
        layer_types: the layer types whose tables are patched; by default full attention.

    Raises:
        ValueError: the checkpoint is patched already or a GGUF file, or the method does not fit it.
        OSError: there is nothing that can be read.

    Example:
        >>> import rope_patch
        >>> folder = rope_patch.data_path("assets") / "llama"
        >>> rope_patch.settings(folder, "abf:rope_theta=500000")["rope_parameters"]
        {'rope_type': 'default', 'rope_theta': 500000.0}
    """
    if is_gguf(model):
        raise ValueError(f"{model} is a GGUF file, which has no config: give the checkpoint's folder")
    return _keys(checkpoint_under(model, method, target_length=target_length, layer_types=layer_types))


def _keys(checkpoint: PatchedCheckpoint) -> dict[str, Any]:
    keys = checkpoint.settings()
    return {"text_config": keys} if checkpoint.multimodal else keys


def statement_of(checkpoint: PatchedCheckpoint, program: str) -> Flags:
    """Return what to write so that a program runs a checkpoint under the method that it was patched with here.

    Args:
        checkpoint: the checkpoint under the method.
        program: the program, a key of :data:`STATEMENTS`.

    Raises:
        ValueError: the program is unknown, or cannot state the tables, with the reason.
    """
    if program not in STATEMENTS:
        raise ValueError(f"unknown program {program!r}. Known: {', '.join(STATEMENTS)}")
    source = checkpoint.source
    if is_gguf(source) and program != "llama.cpp":
        raise ValueError(f"{source} is a GGUF file, which {program} settings do not fit: give the checkpoint's folder")
    engine = program in ENGINES and program != "llama.cpp"
    if engine and checkpoint.multimodal and "text_config" not in config_json(source):
        raise ValueError(
            f"{source} is a {checkpoint.stated.outer_type} checkpoint without a text_config: where {program} would "
            f"take the keys of its rotary table is not known. {_folder('it')}"
        )
    return STATEMENTS[program](checkpoint)


def _python(call: str, keys: Mapping[str, Any], *arguments: str) -> tuple[str, ...]:
    """Return a call in Python with keyword arguments, one a line."""
    lines = [*arguments, *(f"{name}={value!r}" for name, value in keys.items())]
    return (f"{call}(", *(f"    {line}," for line in lines), ")")


def _transformers(checkpoint: PatchedCheckpoint) -> Flags:
    keys = _keys(checkpoint)
    lines = _python("AutoModelForCausalLM.from_pretrained", keys, repr(checkpoint.source))
    return Flags("transformers", lines, keys, "transformers 5, by which the tables were built from these keys")


def _older_settings(checkpoint: PatchedCheckpoint, program: str, shown: str) -> tuple[dict[str, Any], str]:
    """Return the keys of transformers 4 that state the tables, and how it is known that a program reads them.

    Args:
        checkpoint: the checkpoint under the method.
        program: the program.
        shown: how it is known for the families whose code was compared.
    """
    keys = checkpoint.settings()
    stated = checkpoint.stated
    if checkpoint.multimodal:
        raise ValueError(f"{program} takes no keys for a part of a config")
    parameters = keys.pop("rope_parameters")
    older = older_keys(stated.model_type, parameters, stated.complete.get("layer_types") or ())
    if "rope_theta" in parameters:  # what GPT-NeoX makes of rotary_emb_base when its config is built
        older.setdefault("rope_theta", parameters["rope_theta"])
    if OLDER_FAIL in older.values():
        raise ValueError("the keys of transformers 4 cannot state this table")
    for key in ("rope_scaling", "rope_parameters"):  # what the checkpoint scaled with would stay beside the new keys
        if stated.raw.get(key):
            older.setdefault(key, None)
    known = checkpoint.shown_by(program, older | keys)
    return older | keys, known if UNVERIFIED in known else shown


def _transformers_4(checkpoint: PatchedCheckpoint) -> Flags:
    run = "transformers 4.57.6, which was run with such keys"
    keys, shown = _older_settings(checkpoint, "transformers-4", run)
    source = repr(checkpoint.source)
    lines = (  # as arguments of from_pretrained, families without a rope_scaling of their own would refuse them
        f"config = AutoConfig.from_pretrained({source})",
        f"config.update({keys!r})",
        f"AutoModelForCausalLM.from_pretrained({source}, config=config)",
    )
    return Flags("transformers-4", lines, keys, shown)


def _mlx(checkpoint: PatchedCheckpoint) -> Flags:
    keys, shown = _older_settings(checkpoint, "mlx", _read("mlx-lm 0.32.0"))
    lines = _python("mlx_lm.load", {"model_config": keys}, repr(checkpoint.source))
    return Flags("mlx", lines, keys, shown, ("the commands of mlx-lm take no keys",))


def _trl(checkpoint: PatchedCheckpoint) -> Flags:
    keys = _keys(checkpoint)
    note = "in a script of your own: trl sft and TRL's other commands replace model_init_kwargs"
    shown = "TRL 1.16.0, whose SFTTrainer was run with such keys"
    return Flags("trl", _python("SFTConfig", {"model_init_kwargs": keys}), keys, shown, (note,))


def _axolotl(checkpoint: PatchedCheckpoint) -> Flags:
    if checkpoint.multimodal:
        raise ValueError("axolotl would replace the whole text_config. " + _folder("base_model"))
    keys = checkpoint.settings()
    text = yaml.safe_dump({"overrides_of_model_config": keys}, default_flow_style=None, sort_keys=False, width=1 << 20)
    return Flags("axolotl", tuple(text.splitlines()), keys, _read("axolotl 0.18.0"))


def _ms_swift(checkpoint: PatchedCheckpoint) -> Flags:
    keys = checkpoint.settings()
    scaling = f"--rope_scaling {shlex.quote(json.dumps(keys['rope_parameters']))}"
    lines = (scaling, f"--max_model_len {checkpoint.stated.context}")
    return Flags("ms-swift", lines, keys, _read("ms-swift 4.6.0"))


def _llama_factory(checkpoint: PatchedCheckpoint) -> Flags:
    raise ValueError(
        "LLaMA-Factory 0.9.6 takes the name of a type alone, and computes a factor and no base. "
        + _folder("model_name_or_path")
    )


def _verl(checkpoint: PatchedCheckpoint) -> Flags:
    raise ValueError(
        "verl 0.10.0 fails on keys that hold dictionaries, and does not pass them to its rollouts. "
        + _folder("actor_rollout_ref.model.path")
    )


def _read(program: str) -> str:
    return f"written from {program}, not run"


def _folder(option: str) -> str:
    return f"rope-patch apply MODEL METHOD -o FOLDER writes a folder for {option}"


STATEMENTS: dict[str, Callable[[PatchedCheckpoint], Flags]] = {
    "transformers": _transformers,
    "transformers-4": _transformers_4,
    "trl": _trl,
    "axolotl": _axolotl,
    "llama-factory": _llama_factory,
    "ms-swift": _ms_swift,
    "verl": _verl,
    **ENGINES,
    "mlx": _mlx,
}
"""Functions that write a statement, by the name of the program that ``rope-patch settings --for`` takes."""
