"""Checks of a checkpoint's folder by its config and the headers of its files; whole weights are never read."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import ADAPTER_FILE, RECORD_FILE
from rope_patch.checkpoints.source_files import config_json
from rope_patch.checkpoints.weight_files import INDEX_FILE, check_weights, names_in_index, wrong_tensors
from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check
from rope_patch.diagnosis.in_memory import REPAIR
from rope_patch.patching.older_keys import older_differences, text_part

_BASE = re.compile(r'(theta|rotary_emb\w*base)": (?!null)')
"""A key of config.json that states a base: GPT-NeoX has one of its own, and ModernBERT's contain ``theta``."""
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
"""Patterns of the files in which tokenizers of transformers hold their tokens."""
_ROWS = 8
"""Number of rows of the head that are compared with those of the embedding: enough to tell two matrices apart."""


def keys_agree(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Check that ``config.json`` gives transformers 4 and transformers 5 the same table."""
    config = config_json(folder)
    text = text_part(config)
    rotates = hasattr(model.config.get_text_config(), "rope_parameters")
    if rotates and not _BASE.search(json.dumps(text)):
        yield Check(
            "no base",
            NOTE,
            f"config.json states no rope_theta: the default of {type(model.config).__name__} is used",
            meaning="other programs may have another default",
            fix="write the rope_theta that the model was trained with into config.json",
        )
    wrong = older_differences(config)
    if not wrong:
        yield Check("config.json", HOLDS, "its keys for transformers 4 and 5 do not contradict each other")
        return
    fix = (
        "state the whole table in rope_parameters, rope_theta among its keys, and take out rope_scaling, and a "
        "rope_theta beside it"
    )
    if "rope_patch" in text:  # which of the keys is right, the record says
        fix = REPAIR
    yield Check(
        "config.json",
        DIFFERS,
        "; ".join(wrong),
        "rope_scaling and rope_theta that repeat rope_parameters",
        "transformers 5 takes rope_scaling in place of rope_parameters where both are there; others take the other",
        fix,
    )


def tensors_are_there(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Check that the weights files are whole, and hold the tensors of the model that the config describes."""
    try:
        check_weights(folder)
    except OSError as error:
        yield Check("weights files", DIFFERS, str(error), meaning="the model cannot be loaded as it was saved")
        return
    if not any(folder.glob("*.safetensors")):
        yield Check("weights files", UNKNOWN, "they are no safetensors files: pickled ones (*.bin) are not opened")
        return
    # Tensors that the model does not know are only warned of: each warning becomes a check that does not count.
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        wrong = wrong_tensors(folder, model)
    if wrong:
        yield Check(
            "weights files",
            DIFFERS,
            wrong,
            f"the tensors of {type(model).__name__}",
            "transformers gives tensors that are missing random values, other ones at each load",
            "save the model again, or copy the folder again",
        )
    else:
        yield Check("weights files", HOLDS, f"every file is whole, with the tensors of {type(model).__name__}")
    for remark in remarks:
        yield Check("unknown tensors", NOTE, str(remark.message))
    yield from _tied_head_is_tied(folder, model)


def _tied_head_is_tied(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Check that a head which the config ties to the embedding is not stored with other values."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    rows = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in {names[id(head)], names[id(embedding)]} & set(file.keys()):
                rows[name] = file.get_slice(name)[:_ROWS]
    if len(rows) < 2 or torch.equal(*rows.values()):
        yield Check("tied head", HOLDS, "the head is the embedding, as the config says")
        return
    yield Check(
        "tied head",
        DIFFERS,
        f"the file holds another {names[id(head)]}",
        "the embedding's values, since the config says tie_word_embeddings",
        "loaders that obey the config drop the head that was trained",
        "set tie_word_embeddings to false in config.json",
    )


def tokenizer_is_there(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Note that the folder holds no tokenizer."""
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        found = "the folder holds no tokenizer (tokenizer.json)"
        yield Check("no tokenizer", NOTE, found, fix="copy those of the original model into it")


def no_leftovers(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Check that the folder has no files of another save, which a loader might take instead."""
    left = []
    whole, index = folder / "model.safetensors", folder / INDEX_FILE
    if whole.is_file() and index.is_file() and whole.name not in names_in_index(index):
        left.append((f"{whole.name} and {INDEX_FILE} are both there: loaders take one or the other", True))
    unpatched = getattr(model.config.get_text_config(), "rope_patch", None) is None
    without_patch = unpatched and (folder / RECORD_FILE).is_file()
    if (folder / ADAPTER_FILE).is_file():
        beside = f"{ADAPTER_FILE} lies beside the model: transformers puts that adapter on it when it loads"
        if without_patch:
            beside += ", without the patch that it was trained under"
        left.append((beside, without_patch))
    elif without_patch:
        left.append((f"{RECORD_FILE} is there, and the config says nothing of a patch", True))
    if any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin")):
        left.append(("pytorch_model*.bin lies beside safetensors files, which transformers prefers", False))
    for sentence, counts in left:
        yield Check(
            "leftovers",
            DIFFERS if counts else NOTE,
            sentence,
            "the files of one save",
            "what is loaded depends on the program",
            "move the files of the older save elsewhere",
        )
    if not left:
        yield Check("leftovers", HOLDS, "no files of another save lie in the folder")


CHECKS: tuple[Callable[[Path, PreTrainedModel], Iterator[Check]], ...] = (
    keys_agree,
    tensors_are_there,
    tokenizer_is_there,
    no_leftovers,
)
"""Every check of a folder that holds a whole model, in the order in which they are made."""
