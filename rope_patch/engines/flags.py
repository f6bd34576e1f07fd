"""Options of engines by which they run an unchanged checkpoint under a method, as ``rope-patch settings`` prints them.

Each program lets its user state a part of a config. What is written here is what transformers, or the program's rule
in ``rules``, builds the very tables of the method from; anything else is refused with the reason. What each does with
its option, and where that was read:

- vLLM 0.33.0, ``--hf-overrides``: ``config/model.py``, ``_apply_dict_overrides`` sets a dictionary in the place of
  the old one, and ``_update_nested`` merges those of ``text_config``. ``--max-model-len``: the context.
- SGLang 0.5.23, ``--json-model-override-args``: ``srt/utils/hf_transformers/config.py`` merges ``rope_parameters`` into
  what the config has, and those of ``text_config`` take the place of the old. ``--context-length``: the context.
- llama.cpp 0c1e57098, ``--rope-scaling``, ``--rope-scale``, ``--rope-freq-base``, ``--yarn-orig-ctx``,
  ``--yarn-beta-fast``, ``--yarn-beta-slow``, ``--ctx-size``: ``common/arg.cpp``. ``--yarn-attn-factor`` is overwritten
  in ``src/llama-context.cpp`` where YaRN is on. ``--override-kv``: a prompt gets no more than the context that the file
  states, ``tools/server/server-context.cpp`` (ggml-org/llama.cpp issues 17459 and 22140).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.source_files import config_json
from rope_patch.engines.encodings import config_keys, with_context
from rope_patch.engines.folders import read_tables
from rope_patch.engines.forms import SHARE, keys_with_effect, without_tables
from rope_patch.engines.program_contexts import kind_of, other_contexts
from rope_patch.engines.programs import PROGRAMS, UNVERIFIED
from rope_patch.engines.readings import reading_of
from rope_patch.engines.stated_config import StatedConfig
from rope_patch.engines.verdicts import DROPPED, MOVED, SAME, SENTENCES, WINDOW
from rope_patch.gguf.table import graph_of, read_gguf
from rope_patch.methods import MethodLike
from rope_patch.patching.install import apply
from rope_patch.patching.locate import locate
from rope_patch.patching.older_keys import lost_base, text_part
from rope_patch.runtime.folders import is_gguf


@dataclass(frozen=True)
class Flags:
    """The options with which a program runs a checkpoint under a method.

    Attributes:
        program: the program, as ``rope-patch settings --for`` takes it.
        lines: the options for the program's command line.
        settings: the settings that these options state, parsed.
        shown_by: the way in which this was checked; ``"unverified"`` if the program itself was not run.
        notes: further sentences for the user.
    """

    program: str
    lines: tuple[str, ...]
    settings: Mapping[str, Any]
    shown_by: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchedCheckpoint:
    """A checkpoint under a method, for which a program's options are written.

    Attributes:
        source: the folder, hub id or GGUF file of the checkpoint.
        model: the patched model, without weights.
        stated: the config as it was, with the tables of the method, over the context that it reaches.
    """

    source: str
    model: Any
    stated: StatedConfig

    def settings(self) -> dict[str, Any]:
        """Return the keys of a config that state the tables, for transformers and for engines."""
        keys = config_keys(locate(self.model), [*self.stated.tables.values()], everywhere=True)
        keys |= dict.fromkeys(["max_position_embeddings", *other_contexts(self.stated.complete)], self.stated.context)
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def multimodal(self) -> bool:
        """Whether the keys of the table stand in the ``text_config`` of the checkpoint."""
        return self.stated.outer_type != self.stated.model_type

    def flags(self, program: str, settings: Mapping[str, Any], parameters: Any, override: str, context: str) -> Flags:
        """Return the options of a program that takes settings for the text config, and the context beside them.

        Args:
            program: the program.
            settings: the settings.
            parameters: the ``rope_parameters`` that the program makes of them and of the config.
            override: the name of the option that takes the settings.
            context: the name of the option that takes the context.

        Raises:
            ValueError: as for :meth:`shown_by`.
        """
        shown = self.shown_by(program, {**settings, "rope_parameters": parameters})
        given = settings
        if self.multimodal:
            given = {"text_config": settings}
        option = f"{override} {shlex.quote(json.dumps(given, sort_keys=True))}"
        return Flags(program, (option, f"{context} {self.stated.context}"), settings, shown)

    def shown_by(self, program: str, settings: Mapping[str, Any]) -> str:
        """Return how it is known that a program computes the tables from the config with these settings.

        Raises:
            ValueError: the program does not compute them, with the reason.
        """
        complete = dict(self.stated.complete) | {key: value for key, value in settings.items() if value is not None}
        complete.pop("original_max_position_embeddings", None)  # vLLM's default limit, which --max-model-len lifts
        raw = dict(self.stated.raw)
        # They go into the config that transformers 5 completes, which has no others.
        if settings.get("rope_parameters"):
            raw = without_tables(raw)
        raw |= dict(settings)
        reading = reading_of(program, replace(self.stated, raw=raw, complete=complete))
        name = f"{PROGRAMS[program].name} {reading.version}"
        if reading.refused:
            raise ValueError(f"{name} cannot run {self.stated.model_type}: {reading.refused}")
        if reading.unknown:
            return f"{UNVERIFIED}: {reading.unknown}"
        if not reading.agrees(self.stated):
            sentences = [SENTENCES[each] for each in reading.seen.values() if each != SAME]
            raise ValueError(f"with its options {name} differs: {'; '.join([*sentences, *reading.reasons])}")
        if self.multimodal:
            return f"{name}; how they get into text_config was read in its source"
        return name


def checkpoint_under(
    source: str | Path,
    method: MethodLike,
    *,
    target_length: int | None = None,
    layer_types: Sequence[str] | None = None,
) -> PatchedCheckpoint:
    """Return an unpatched checkpoint under a method.

    Args:
        source: the folder or hub id of the checkpoint; for llama.cpp a GGUF file, too.
        method: the method to apply.
        target_length: the context that the method is made for [tokens].
        layer_types: the layer types whose tables are patched; by default full attention.

    Raises:
        ValueError: the checkpoint is patched already, or the method does not fit it.
        OSError: there is nothing that can be read.
    """
    model = model_without_weights(source)
    if locate(model).record is not None:
        raise ValueError(f"{source} is patched already: give the checkpoint before the patch (rope-patch restore)")
    config = config_json(source)
    if lost_base(text_part(config)):
        raise ValueError(
            f"{source} states a scaling without its base, rope_theta: rope-patch doctor {source} says more"
        )
    before = StatedConfig.of(locate(model).config, config, ())  # now, since the patch changes the config
    patch = apply(model, method, target_length=target_length, layer_types=layer_types)
    # Without a target length, the options state the context that the method reaches.
    reach = max(patch.method.reach(patch.before[kind]) or 0 for kind in patch.record.layer_types)
    tables = with_context(read_tables(model), target_length or max(reach, patch.record.stated_length))
    stated = replace(before, tables={table.layer_type: table for table in tables})
    return PatchedCheckpoint(str(source), model, stated)


# --- engines ---------------------------------------------------------------------------------------------------------


def _vllm(checkpoint: PatchedCheckpoint) -> Flags:
    stated = checkpoint.stated
    settings = checkpoint.settings()
    parameters = settings["rope_parameters"]
    if checkpoint.multimodal:  # what it finds in text_config is merged into the old dictionaries
        merged = {**stated.complete["rope_parameters"]}
        for kind in stated.tables:
            old = stated.parameters(kind)
            new = parameters if kind is None else parameters[kind]
            if SHARE in old:
                new.setdefault(SHARE, 1.0)
            if kind is None:
                merged |= new
            else:
                merged[kind] = {**old, **new}
        parameters = merged
    return checkpoint.flags("vllm", settings, parameters, "--hf-overrides", "--max-model-len")


def _sglang(checkpoint: PatchedCheckpoint) -> Flags:
    settings = checkpoint.settings()
    parameters = settings["rope_parameters"]
    if not checkpoint.multimodal:  # of a multimodal checkpoint, they take the place of the old
        parameters = checkpoint.stated.complete["rope_parameters"] | parameters
    return checkpoint.flags("sglang", settings, parameters, "--json-model-override-args", "--context-length")


def _llama_cpp(checkpoint: PatchedCheckpoint) -> Flags:
    stated = checkpoint.stated
    if stated.model_type == "gemma2":  # llama_model::get_rope_freq_base
        raise ValueError(
            "llama.cpp's options do not reach the sliding layers of gemma2, every other one: these keep the base and "
            "the scale of the file. rope-patch apply FILE.gguf METHOD -o OUT.gguf writes another table for all of them"
        )
    # Its form is that of the unpatched config; of a multimodal checkpoint, files hold the text model alone.
    layers = reading_of("llama.cpp", replace(stated, outer_type=stated.model_type))
    wrong = [SENTENCES[seen] for seen in layers.seen.values() if seen in (DROPPED, WINDOW, MOVED)]
    if any(layer.window for layer in stated.layers) and layers.unknown:
        wrong = [f"whether it keeps the sliding windows of {stated.model_type} was not checked"]
    if wrong:
        raise ValueError(f"llama.cpp runs other layers: {'; '.join(dict.fromkeys(wrong))}")
    graph = graph_of(stated.model_type)
    if graph.always or len(graph.tensors) > 1:
        raise ValueError(f"whether llama.cpp's graph for {graph.architecture} obeys its options was never checked")
    # The options state one table, that of full attention: sliding layers keep the plain one of the file.
    tables = stated.tables
    table = tables.get(None) or tables["full_attention"]
    for other in tables.values():
        if other is not table and not other.is_geometric:
            raise ValueError(
                f"llama.cpp's options do not reach {other.layer_type} layers, and their table is not plain"
            )
    if is_gguf(checkpoint.source) and not read_gguf(checkpoint.source).tables[0].is_geometric:
        raise ValueError(
            f"{checkpoint.source} holds factors or a scaling of its own, and the options would come on top of them"
        )
    encoded = {"rope_type": "custom", **(table.rope_parameters or {}), "rope_theta": table.rope_theta}
    known = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
    expressed = kind_of(encoded) in ("default", "linear", "yarn") and known.issuperset(keys_with_effect(encoded))
    if not expressed:
        raise ValueError(
            f"llama.cpp's options cannot express this table ({table.rope_type}): they know a base, linear scaling and "
            "YaRN with a factor on cos and sin of its own. What the model's graph can compute, "
            "rope-patch apply FILE.gguf METHOD -o OUT.gguf writes into a file"
        )
    kind = kind_of(encoded)
    options: dict[str, Any] = {"--rope-freq-base": table.rope_theta, "--rope-scaling": "none"}
    if kind != "default":
        options |= {"--rope-scaling": kind, "--rope-scale": encoded["factor"]}
    if kind == "yarn":
        options |= {"--yarn-orig-ctx": encoded["original_max_position_embeddings"]}
        for key in ("beta_fast", "beta_slow"):
            if key in encoded:
                options[f"--yarn-{key.replace('_', '-')}"] = encoded[key]
    options |= {"--ctx-size": stated.context}
    # The server gives a prompt no more than the context that the file states.
    if stated.context > stated.complete["max_position_embeddings"]:
        options |= {"--override-kv": f"{graph.architecture}.context_length=int:{stated.context}"}
    lines = []
    for name, value in options.items():
        if isinstance(value, float):
            value = f"{value:.9g}"
        lines.append(f"{name} {value}")
    shown = f"{UNVERIFIED}: read in llama.cpp's source at 0c1e57098, and run on Llama alone"
    if stated.model_type == "llama":
        shown = "llama.cpp 0c1e57098, whose logits with such options are those of the table (make test-engines)"
    notes: tuple[str, ...] = ()
    if not is_gguf(checkpoint.source):
        notes = ("use them with a GGUF file of this checkpoint that holds no rotary factors and no scaling",)
    return Flags("llama.cpp", tuple(lines), options, shown, notes)


ENGINES: dict[str, Callable[[PatchedCheckpoint], Flags]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
}
"""Functions that write the options of an engine, by its name."""
