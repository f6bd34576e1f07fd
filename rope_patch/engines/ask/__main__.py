"""Print the rotary tables that an engine's own code builds from checkpoints, without their weights.

``ENGINE/bin/python rope_patch/engines/ask PROGRAM FOLDER...``, where the Python is the one in which the engine is
installed, and the program names one of the modules beside this one (``vllm_layers``, ...). Each of these has three
functions: ``version()``, ``model_of(path)``, and ``layers_of(model)``, which returns the context that the engine serves
and what each layer does: cos and sin of its pairs of features at position 1, and the window. Marked lines of the output
are JSON: the version, and an answer for each folder.
"""

import importlib
import json
import math
import sys
from typing import Any

MARK = "ROPE_PATCH_ASKED "


def table_of(layer: dict[str, Any]) -> dict[str, Any]:
    """Return frequencies and attention factor of a layer in the place of cos and sin at position 1."""
    rest = {key: value for key, value in layer.items() if key not in ("cos", "sin")}
    if layer["cos"] is None:  # a layer without a rotary table
        return {"inv_freq": None, "attention_scaling": None, **rest}
    pairs = [(float(cos), float(sin)) for cos, sin in zip(layer["cos"], layer["sin"], strict=True)]
    return {
        "inv_freq": [math.atan2(sin, cos) for cos, sin in pairs],
        "attention_scaling": max(math.hypot(*pair) for pair in pairs),
        **rest,
    }


def answer_of(engine: Any, path: str) -> dict[str, Any]:
    """Return what an engine does with a checkpoint, its error, or why its model could not be read."""
    try:
        model = engine.model_of(path)
    except Exception as error:
        return {_kind(error): _text(error)}
    try:
        answer = engine.layers_of(model)
    except (AttributeError, NotImplementedError) as error:  # parts of the model have other names than here
        return {"unread": _text(error)}
    except Exception as error:
        return {_kind(error): _text(error)}
    return {**answer, "layers": [table_of(layer) for layer in answer["layers"]]}


def _kind(error: Exception) -> str:
    """Return what an error is: one that the missing weights cause says nothing of the engine."""
    return "unread" if "meta tensor" in str(error) else "error"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main(program: str, *paths: str) -> None:
    """Ask an engine about checkpoints, and print its answers."""
    engine = importlib.import_module(f"{program}_layers")
    print(MARK + json.dumps(engine.version()))
    for path in paths:
        print(MARK + json.dumps(answer_of(engine, path)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
