"""Checks of a checkpoint's folder by its config and the headers of its files; whole weights are never read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.generic import flatten_dict

from rope_patch.checkpoints.adapters import ADAPTER_FILE, RECORD_FILE
from rope_patch.checkpoints.source_files import cache_scales, config_json
from rope_patch.checkpoints.weight_files import INDEX_FILE, OTHER_SHAPE, check_weights, names_in_index, wrong_tensors
from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check
from rope_patch.diagnosis.in_memory import REPAIR
from rope_patch.patching.config_settings import settings_of
from rope_patch.patching.older_keys import lost_base, older_differences, stated_twice, text_part


def keys_agree(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Check that ``config.json`` states each setting once, and gives transformers 4 and 5 the same table."""
    config = config_json(folder)
    text = text_part(config)
    own = model.config.get_text_config()
    stated = flatten_dict(text)
    used = flatten_dict(settings_of(own).get("rope_parameters") or {})
    base = own.default_theta
    if base in used.values() and base not in stated.values():
        yield _without_base(text, base, type(own).__name__)
    wrong = stated_twice(stated, used) or older_differences(config)
    if not wrong:
        yield Check("config.json", HOLDS, "its keys for transformers 4 and 5 do not contradict each other")
        return
    fix = "write the value that is meant in both places, or in rope_parameters alone, where rope_theta belongs, too"
    if "rope_patch" in text:  # which of the keys is right, the record says
        fix = REPAIR
    yield Check(
        "config.json",
        DIFFERS,
        "; ".join(wrong),
        "keys that repeat what rope_parameters says",
        "other programs may take the other value; transformers 5 takes rope_scaling where rope_parameters is there",
        fix,
    )


def _without_base(text: dict[str, Any], base: float, name: str) -> Check:
    """Return the check of a config.json without a base, which was lost if transformers 5 wrote the file."""
    found = f"config.json states no rope_theta: {base:g} is the default of {name}"
    if not lost_base(text):
        return Check("base", NOTE, found)
    complete = json.dumps({"rope_parameters": {**text["rope_parameters"], "rope_theta": base}})
    return Check(
        "base",
        DIFFERS,
        found,
        "rope_parameters with a rope_theta, as transformers 5 writes it",
        "a rope_scaling= without a base replaces all of rope_parameters in transformers 5, and the base of the "
        "checkpoint is lost",
        f"write the base of the original checkpoint in place of {base:g} into {complete}; rope-patch settings MODEL "
        "METHOD prints complete keys",
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
        meaning = "transformers gives tensors that are missing random values, other ones at each load"
        if OTHER_SHAPE in wrong:
            meaning = "transformers refuses to load the folder"
        yield Check(
            "weights files",
            DIFFERS,
            wrong,
            f"the tensors of {type(model).__name__}",
            meaning,
            "is config.json that of another model? If not, save the model again, or copy the folder again",
        )
    else:
        yield Check("weights files", HOLDS, f"every file is whole, with the tensors of {type(model).__name__}")
    for scales in cache_scales(folder):
        yield Check("cache scales", NOTE, scales)
    for remark in remarks:
        yield Check("unknown tensors", NOTE, str(remark.message))


def no_leftovers(folder: Path, model: PreTrainedModel) -> Iterator[Check]:
    """Check that the folder has no files of another save, which a loader might take instead."""
    left = []
    whole = folder / "model.safetensors"
    index = folder / INDEX_FILE
    if whole.is_file() and index.is_file() and whole.name not in names_in_index(index):
        left.append(f"{whole.name} and {INDEX_FILE} are both there: loaders take one or the other")
    unpatched = getattr(model.config.get_text_config(), "rope_patch", None) is None
    if unpatched and (folder / RECORD_FILE).is_file():
        if (folder / ADAPTER_FILE).is_file():
            left.append(
                f"transformers puts the adapter of {ADAPTER_FILE} on the model, without the patch of the adapter"
            )
        else:
            left.append(f"{RECORD_FILE} is there, and the config says nothing of a patch")
    for sentence in left:
        yield Check(
            "leftovers",
            DIFFERS,
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
    no_leftovers,
)
"""Every check of a folder that holds a whole model, in the order in which they are made."""
