"""Check which cache formats a checkpoint works with, under which rotary tables, and where the cost comes from.

For every method and format, perplexity and retrieval are measured through a cache that is quantized exactly as in
decoding, and in full precision on the same windows and prompts. The change of the next token's distribution is
measured, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rope_patch.analysis.outliers import KeyBias, bias_sentences, key_biases
from rope_patch.evaluation.compare import methods_in_place, naming_method
from rope_patch.evaluation.finished_work import Resume, finished_work, open_work
from rope_patch.evaluation.suite import EvalSuite, as_suite
from rope_patch.kv_cache.plans import plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.calibration import calibrated, unrounded, with_scales
from rope_patch.kv_evaluation.check_setting import COMPARED_WINDOWS, Setting, WindowStates
from rope_patch.kv_evaluation.measure_format import measure_attribution, measure_formats, tokens_to_attribute
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.kv_evaluation.verdicts import CheckRow, verdict_of
from rope_patch.methods import MethodLike
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers
from rope_patch.modeling.capture import capturing
from rope_patch.modeling.environment import environment
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.reader import Reader, model_name
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.patching.locate import locate
from rope_patch.patching.verify import trained_length
from rope_patch.runtime import progress
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import Source, spread_windows


def check_spec(spec: EvalSpec) -> None:
    """Raise ValueError unless a spec can be used for a check of caches.

    Raises:
        ValueError: the spec asks for no window of text, or for key tokens.
    """
    if spec.short_context is not None:
        raise ValueError("a check of caches does not look for key tokens, which compare does: leave short_context out")
    if spec.windows == 0:
        raise ValueError("a check of caches needs windows of text: give windows >= 1, got 0")


def parse_formats(names: Sequence[str] | Mapping[str, str], *, calibrating: bool = False) -> dict[str, Scheme]:
    """Return the formats that are measured, by the names that they were given, full precision first.

    Args:
        names: names of presets, or formats written out, or these by names of your own; full precision is skipped, and
            so is a name that is given twice.
        calibrating: whether one of them must take the scales of a text.

    Raises:
        ValueError: a format cannot be read, two names mean the same format, there is none besides full precision, or
            none takes scales.
    """
    formats = {"none": Scheme()}
    texts = names if isinstance(names, Mapping) else {name: name for name in names}
    for name, text in texts.items():
        scheme = Scheme.parse(text)
        if scheme == Scheme():
            continue
        equal = next((other for other, known in formats.items() if known == scheme), None)
        if equal is not None:
            raise ValueError(f"formats must differ from each other, but {equal!r} and {name!r} both mean {scheme}")
        formats[name] = scheme
    if len(formats) == 1:
        raise ValueError("give at least one format other than none")
    if calibrating and not any(scheme.takes_scales for scheme in formats.values()):
        raise ValueError(f"calibrate is for keys and values in fp8: add vllm:fp8 to {', '.join(texts)}")
    return formats


# Long: the public function, whose options are documented one by one.
def kv_check(
    model: nn.Module,
    tokenizer: Any,
    formats: Sequence[str] | Mapping[str, str],
    spec: EvalSpec | EvalSuite,
    *,
    methods: Sequence[MethodLike] = ("default",),
    limits: Limits | None = None,
    calibrate: Source | None = None,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    resume: Resume = None,
) -> KVCheck:
    """Measure cache formats under several methods on a model, which is left as it was.

    Args:
        model: a causal language model; if it is patched already, ``"default"`` measures it with its patch.
        tokenizer: the tokenizer of the model.
        formats: names of presets, or formats written out, or these by names of your own; full precision is always
            measured, too.
        spec: the spec of what is measured, or a suite made from it, which may have texts in memory.
        methods: methods under which the formats are measured, as method strings.
        limits: limits of what a safe format may cost; by default 2 % of perplexity.
        calibrate: text on which a scale for the keys and one for the values of each layer are computed, as
            :func:`~rope_patch.texts.documents.documents` takes it; ``"builtin"`` is text that no window has by default.
            Every fp8 format is measured with them, too, under its name and the word *calibrated*.
        layer_types: layer types whose tables are patched, on a model with several tables.
        freeze_at: length at which a dynamic table is frozen before anything is measured [tokens].
        resume: file (or mapping) in which finished work is stored. The same call continues where it stopped, and reads
            only two windows again, for the statistics of keys and the states in full precision.

    Raises:
        ValueError: a format, method, task, length or limit is wrong, two formats or methods are the same, or there is
            too little text; it is raised before anything is measured.

    Example:
        ``kv_check(model, tokenizer, ["kivi-2"], EvalSpec(lengths=[4096])).summary()``
    """
    limits = limits or Limits()
    if isinstance(formats, str):
        raise ValueError(f"formats must be a list of formats, got {formats!r}")
    parsed = parse_formats(formats, calibrating=calibrate is not None)
    suite = as_suite(spec, tokenizer)
    check_spec(suite.spec)
    texts = []
    if calibrate is not None:
        source = builtin_text("train") if calibrate == "builtin" else calibrate
        calibration, _ = spread_windows(suite.tokenizer, source, suite.spec.longest, option="calibrate")
        texts = [window.ids for window in calibration]
        progress.more(len(methods) * len(texts) * suite.spec.longest)
    places = methods_in_place(model, methods, suite.spec.longest, layer_types=layer_types, freeze_at=freeze_at)
    record = locate(model).record
    # A format that does not fit raises before anything is measured. Which features rotate depends on the method.
    layers: dict[str, Sequence[AttentionLayer]] = {}
    biases: tuple[KeyBias, ...] = ()
    for label, in_place in places.items():
        with in_place() as tables, unrounded(model):
            layers[label] = find_attention_layers(model)
            for name, scheme in parsed.items():
                with naming_method(name):
                    plan_layers(layers[label], scheme)
            if len(layers) == 1:
                biases = key_biases(model, layers[label])
    for sentence in bias_sentences(biases):
        progress.say(sentence)
    different = {tensor_hash(window.ids): window.ids for window in suite.windows[:COMPARED_WINDOWS]}
    compared = torch.stack(list(different.values()))
    work = open_work(model, resume)
    rows = []
    captures = {}
    for label, in_place in places.items():
        with in_place() as tables, unrounded(model):
            reader = Reader(model)
            states = WindowStates(reader, compared, suite.spec.chunk)
            with progress.stage(f"{label}, statistics of keys"), capturing(layers[label], compared) as sums:
                states.all()
            captures[label] = sums.result(model)
            setting = Setting(
                model=model,
                suite=suite,
                limits=limits,
                work=finished_work(model, work, suite.spec.longest),
                compared=compared,
                biases=biases,
                layers=layers[label],
                method=label,
                tables=tables,
                capture=captures[label],
                states=states,
                reader=reader,
            )
            measured = parsed
            if texts:
                with progress.stage(f"{label}, scales of an fp8 cache"):
                    scales = calibrated(model, layers[label], texts, suite.spec.chunk)
                    measured = parsed | with_scales(parsed, scales, "calibrated")
            rows += _measure(setting, measured)
    return KVCheck(
        model=model_name(model) or type(model).__name__,
        rows=tuple(rows),
        spec=suite.spec,
        windows=len(suite.windows),
        text=suite.text_name,
        digest=suite.text_sha256,
        trained_length=trained_length(model),
        limits=limits,
        captures=captures,
        biases=biases,
        environment=environment(model),
        loaded=None if record is None else str(record.to_method()),
    )


def _measure(setting: Setting, formats: Mapping[str, Scheme]) -> list[CheckRow]:
    """Measure every format under a method, and attribute the cost of those that are unsafe at some length."""
    base, *rows = measure_formats(setting, formats)
    unsafe = [
        row
        for row in rows
        if any(verdict_of(row, base, length, setting.limits).kind == "unsafe" for length in setting.lengths)
    ]
    # Only now is it known how many formats are unsafe, so the progress could not count their tokens before.
    progress.more(len(unsafe) * tokens_to_attribute(setting.suite.planned, len(setting.layers)))
    attributions = {}
    for row in unsafe:
        with progress.stage(f"{setting.method}, {row.format}: attribution"):
            attributions[row.format] = measure_attribution(setting, row)
    return [base, *(replace(row, attribution=attributions.get(row.format)) for row in rows)]
