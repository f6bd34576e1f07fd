"""``rope_patch.analyze`` and ``rope-patch analyze``: how one checkpoint uses its rotary table on a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rope_patch.analysis.attention_mass import measuring_heads
from rope_patch.analysis.heads import Heads
from rope_patch.analysis.outliers import key_biases
from rope_patch.analysis.p_sweep import sweep_p
from rope_patch.analysis.result import Analysis
from rope_patch.analysis.single_heads import SHOWN_TOKENS, SingleHead, read_single_heads, reading_single_heads
from rope_patch.methods.already_scaled import context_reached
from rope_patch.modeling.attention_layers import find_attention_layers
from rope_patch.modeling.capture import capturing
from rope_patch.modeling.environment import environment
from rope_patch.modeling.visit_states import run_decoder
from rope_patch.options.analyze import P_VALUES, TOKENS
from rope_patch.patching.verify import Inspection, inspect_model
from rope_patch.runtime import progress
from rope_patch.runtime.packaged import name_of
from rope_patch.texts.documents import Source
from rope_patch.texts.domains import TextRows, read_rows


# One part after another, most of which need the results of those before: half of the lines are the public docstring.
def analyze(
    model: nn.Module,
    tokenizer: Any,
    text: Source | Mapping[str, Source] | TextRows | None = None,
    *,
    tokens: int = TOKENS,
    window: int | None = None,
    heads: Sequence[tuple[int, int]] = (),
    p_values: Sequence[float] = P_VALUES,
) -> Analysis:
    """Analyze how the heads of a checkpoint use its rotary table, and what the pairs carry that p-RoPE would stop.

    It finds positional heads, sinks and outlier pairs. The model is left as it was. ``rope-patch analyze`` writes the
    same result as a report.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter.
        tokenizer: the tokenizer of the model.
        text: the text that the model reads: a text, file or folder as
            :func:`~rope_patch.texts.documents.documents` reads it, or several by name, of each of which the
            statistics read as much; or what :func:`rows_to_read` returned. By default short texts of five domains that
            ship with the package.
        tokens: the number of tokens that the statistics read at most, over all rows [tokens].
        window: the length of a row of the text; by default the context length, at most 2048 [tokens].
        heads: the heads to show in detail, each as its layer and query head, whose queries and keys the result has for
            all of the text; by default the clearest head of each type, on the first tokens.
        p_values: the values of p of p-RoPE to look at, in (0, 1).

    Returns:
        The result. ``to_json()`` gives it as JSON, :func:`~rope_patch.analysis.result.findings` as sentences, and
        :func:`rope_patch.reports.analysis.page` as a page with figures.

    Raises:
        TypeError: the model is not one of transformers.
        ValueError: a text that is too short; a head that the model does not have; a p outside (0, 1); a model
            whose attention or rotary embedding cannot be measured, with the reason.

    Example:
        >>> import rope_patch
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> folder = rope_patch.data_path("assets") / "llama"
        >>> model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        >>> result = rope_patch.analyze(model, tokenizer, "One two three. " * 40, window=64, tokens=64, p_values=[])
        >>> len(result.heads.layers)
        4
    """
    inspection = inspect_model(model)
    config: Any = model.config
    check_choices(config, heads=heads, p_values=p_values)
    layers = find_attention_layers(model)
    if without := {layer for layer, _ in heads} - {layer.index for layer in layers}:
        raise ValueError(f"no attention is found in layer {min(without)}, of which a head is asked for")
    rows = text
    if not isinstance(rows, TextRows):
        rows = rows_to_read(model, tokenizer, rows, tokens=tokens, window=window)
    progress.more(rows.ids.numel())
    # The rows of a text are numbered by the place of its name among all names.
    texts = list(map(list(dict.fromkeys(rows.groups)).index, rows.groups))
    with (
        measuring_heads(model, rows.ids) as head_sums,
        capturing(layers, rows.ids, texts) as state_sums,
        reading_single_heads(rows.ids, heads, layers) as asked_for,
    ):
        run_decoder(model, rows.ids)
    statistics = state_sums.result(model)
    measured = head_sums.result()
    positional = measured.positional()
    clearest = [] if heads else _clearest(measured)
    # Few tokens, which were not announced.
    with progress.work(0):
        shown = read_single_heads(model, rows.ids[:1, :SHOWN_TOKENS], [*clearest, *positional], layers)
    single_heads = asked_for() or shown[: len(clearest)]
    at_distance = dict(zip((head.shown for head in shown[len(clearest) :]), positional.values(), strict=True))
    return Analysis(
        name=_name(config) or type(model).__name__,
        table=str(inspection),
        method=str(inspection.record.to_method()) if inspection.record else None,
        context=_context(inspection),
        rows=rows,
        capture=statistics,
        heads=measured,
        single_heads=single_heads,
        p_sweep=sweep_p(model, statistics, sorted(p_values, reverse=True), at_distance),
        biases=key_biases(model, layers),
        token_texts=_token_texts(tokenizer, measured, single_heads),
        environment=environment(model),
    )


def rows_to_read(
    model: nn.Module,
    tokenizer: Any,
    text: Source | Mapping[str, Source] | None = None,
    *,
    tokens: int = TOKENS,
    window: int | None = None,
) -> TextRows:
    """Return the rows of text that :func:`analyze` reads for the same arguments."""
    if text is not None and not isinstance(text, Mapping):
        text = {"text": text}
    return read_rows(tokenizer, text, window=window, tokens=tokens, context=_context(inspect_model(model)))


def _context(inspection: Inspection) -> int:
    return max(context_reached(table) for table in inspection.tables)


def check_choices(config: PreTrainedConfig, *, heads: Sequence[tuple[int, int]], p_values: Sequence[float]) -> None:
    """Raise ValueError for an argument of :func:`analyze` that does not fit a model of this config."""
    text = config.get_text_config()
    for p in p_values:
        if not 0 < p < 1:
            raise ValueError(f"p must be in (0, 1), got {p}")
    layers = text.num_hidden_layers
    count = text.num_attention_heads
    for layer, head in heads:
        if not (0 <= layer < layers and 0 <= head < count):
            raise ValueError(
                f"{_name(config) or 'the model'} has layers 0 to {layers - 1} with query heads 0 to {count - 1}, got "
                f"{layer}.{head}"
            )


def _name(config: PreTrainedConfig) -> str:
    """Return the name of the checkpoint that a config is of; empty if it is of none."""
    return name_of(str(getattr(config, "name_or_path", "")))


def _clearest(heads: Heads) -> list[tuple[int, int]]:
    """Return the clearest head of each type, each head once."""
    masses = []
    names = []
    for layer in heads.layers:
        of_layer = torch.stack(
            (
                layer.offset_mass[:, 0],
                layer.offset_mass[:, 1],
                layer.induction_mass.nan_to_num(),
                torch.maximum(layer.first_mass, layer.sink_mass),
                # A head that spreads its attention over all keys looks for nothing.
                layer.content_mass / (1 + layer.entropy),
            )
        )
        masses.append(of_layer)
        names += [(layer.index, head) for head in range(layer.heads)]
    return list(dict.fromkeys(names[place] for place in torch.cat(masses, 1).argmax(1).tolist()))


def _token_texts(tokenizer: Any, heads: Heads, single_heads: Sequence[SingleHead]) -> dict[int, str]:
    named = [layer.sink_token for layer in heads.layers] + [head.shown.token_ids for head in single_heads]
    different = torch.unique(torch.cat([ids.flatten() for ids in named])).tolist()
    return {token: token_text(tokenizer, token) for token in different if token >= 0}


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token; bytes that are no whole character are written as <0xE5>, as SentencePiece does."""
    text: str = tokenizer.decode([token])
    if "\N{REPLACEMENT CHARACTER}" in text:
        # Byte-level vocabularies write each byte as one printable character.
        codes = {name: f"<0x{byte:02X}>" for byte, name in bytes_to_unicode().items() if not name.isascii()}
        text = tokenizer.convert_ids_to_tokens(token).translate(str.maketrans(codes))
    return text
