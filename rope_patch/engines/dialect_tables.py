"""The rules by which other programs build a rotary table from ``rope_parameters``; they are written here alone.

Every program has a function from a dictionary to a table, which is like transformers' own, but leaves out or adds
something. :data:`DIALECTS` holds the differences, found in the versions below, whose code was run or read.
``encodings`` chooses by them an encoding that all engines read alike, and ``tables_by_program`` computes by them the
tables of a whole config. The functions are pure.

*Sources*: transformers 4.57.1 ``modeling_rope_utils.py``; vLLM 0.33.0
``model_executor/layers/rotary_embedding/__init__.py`` (``get_rope``) and ``yarn_scaling_rope.py``; SGLang 0.5.23
``srt/layers/rotary_embedding/factory.py`` and ``yarn.py``; llama.cpp 0c1e57098 ``conversion/base.py``, which writes the
keys of a GGUF file, and ``src/llama-context.cpp``, which reads them; mlx-lm 0.32.2 ``models/rope_utils.py``
(``initialize_rope``). ``make test-engines`` holds what is computed here against the programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rope_patch import frequencies
from rope_patch.engines import program_contexts as contexts
from rope_patch.methods.llama3 import llama3_table
from rope_patch.methods.longrope import longrope_table
from rope_patch.methods.yarn import yarn_scaling, yarn_table
from rope_patch.tables import RotaryTable

SHARE = "partial_rotary_factor"
MSCALE = ("mscale", "mscale_all_dim")


class RefusesError(ValueError):
    """A program fails on a config instead of computing a table; the message is the reason."""


@dataclass(frozen=True)
class Dialect:
    """The rules by which a program's own functions build a table.

    Attributes:
        types: the rope types that the program knows; it fails on others.
        ignored: the rope types that the program reads as plain RoPE, without a warning.
        yarn_keys: the keys in which the program reads YaRN's attention factor.
        longrope_key: the key in which the program reads longrope's attention factor; empty if it always computes it.
        proportional_share: whether the program obeys the share of ``proportional``.
        proportional_factor: whether the program obeys the factor of ``proportional``.
        zero_share: whether the program takes a share of 0.
        truncates: whether the program obeys ``truncate`` of YaRN; otherwise it always rounds the ends of the ramp.
        obeys_betas: whether the program obeys ``beta_fast`` and ``beta_slow`` of YaRN; otherwise they are 32 and 1.
        whole_factors: whether the program takes a factor of ``linear`` that is an integer.
        counts_positions: whether the program's table has a fixed number of positions, which follows from the type.
        context: function that returns the context which the program derives from a config.
    """

    types: frozenset[str]
    ignored: frozenset[str] = frozenset()
    yarn_keys: tuple[str, ...] = ()
    longrope_key: str = ""
    proportional_share: bool = True
    proportional_factor: bool = False
    zero_share: bool = True
    truncates: bool = True
    obeys_betas: bool = True
    whole_factors: bool = True
    counts_positions: bool = False
    context: Callable[[Mapping[str, Any]], contexts.Derived] = contexts.stated_context


TOLERANCE = 1e-5
"""Largest relative difference that float32 and another order of operations make in one formula."""

_ALL = frozenset({"default", "linear", "llama3", "yarn", "longrope", "proportional"})
_EVERY_YARN_KEY = ("attention_factor", *MSCALE)

_TRANSFORMERS = Dialect(_ALL, yarn_keys=_EVERY_YARN_KEY, longrope_key="attention_factor", proportional_factor=True)
DIALECTS: dict[str, Dialect] = {
    "transformers-5": _TRANSFORMERS,
    "transformers-4": replace(_TRANSFORMERS, types=_ALL - {"proportional"}),
    "vllm": Dialect(
        _ALL,
        yarn_keys=_EVERY_YARN_KEY,
        longrope_key="long_mscale",
        zero_share=False,
        whole_factors=False,
        counts_positions=True,
        context=contexts.vllm,
    ),
    "sglang": Dialect(
        _ALL,
        yarn_keys=MSCALE,
        longrope_key="long_mscale",
        proportional_share=False,
        whole_factors=False,
        counts_positions=True,
        context=contexts.sglang,
    ),
    "llama.cpp": Dialect(
        frozenset({"default", "linear", "yarn"}),
        ignored=frozenset({"llama3", "longrope", "proportional", "dynamic"}),
        truncates=False,
        obeys_betas=False,
    ),
    "mlx": Dialect(_ALL, yarn_keys=MSCALE, proportional_factor=True, truncates=False),
}


@dataclass(frozen=True, eq=False)
class Built:
    """A table as a program builds it.

    Attributes:
        inv_freq: (pairs,) float32 frequencies [rad/token].
        attention_scaling: the attention factor, by which cos and sin are multiplied.
        context: the context that the program derives from the config [tokens].
        positions: the number of positions that the program's table holds [tokens]; None if it has no end.
        reasons: sentences on the keys that the program reads otherwise than transformers 5, which explain a difference
            if there is one.
    """

    inv_freq: Tensor
    attention_scaling: float
    context: int
    positions: int | None = None
    reasons: tuple[str, ...] = ()

    def equals(self, table: RotaryTable | Built) -> bool:
        """Tell whether frequencies and attention factor are those of another table, whatever the contexts are."""
        difference = relative_difference(self.inv_freq, table.inv_freq)
        return (
            difference is not None
            and difference <= TOLERANCE
            and abs(self.attention_scaling - table.attention_scaling) <= TOLERANCE
        )

    def is_table(self, table: RotaryTable) -> bool:
        """Tell whether this is a table of transformers 5, over the whole context that the config states."""
        return (
            self.equals(table)
            and self.context == table.max_position_embeddings
            and (self.positions is None or self.positions >= table.max_position_embeddings)
        )


def relative_difference(theirs: Tensor, ours: Tensor) -> float | None:
    """Return the largest difference of two tables, as a share of the larger frequency; None where lengths differ.

    >>> import torch
    >>> relative_difference(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.25]))
    0.5
    """
    if theirs.shape != ours.shape:
        return None
    one, other = (frequencies.zero_unrotated(table.float().cpu()).double() for table in (theirs, ours))
    larger = one.maximum(other)
    # Two unrotated pairs differ by 0, and not by 0 / 0.
    return float(((one - other).abs() / larger.clamp_min(frequencies.UNROTATED)).max())


def table_of_parameters(
    parameters: Mapping[str, Any],
    rotary_dim: int,
    context: int,
    dialect: Dialect,
    *,
    head_dim: int | None = None,
    config: Mapping[str, Any] | None = None,
    reasons: Sequence[str] = (),
) -> Built:
    """Build the table of one dictionary of ``rope_parameters`` as a program does.

    Args:
        parameters: the ``rope_parameters`` of one layer type, with ``rope_theta``.
        rotary_dim: the number of features of a head that rotate.
        context: the value of ``max_position_embeddings`` in the config [tokens].
        dialect: the rules of the program, one of :data:`DIALECTS`.
        head_dim: the number of features of a head, over which ``proportional`` is computed; by default ``rotary_dim``.
        config: the whole config, as far as it states a context; by default what is given here.
        reasons: sentences on what the program read otherwise before; those on the table follow.

    Raises:
        RefusesError: the program fails on these parameters.
        KeyError: a key is missing, without which neither the program nor transformers can build the type.
    """
    kind = contexts.kind_of(parameters)
    theta = parameters["rope_theta"]
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise RefusesError(f"the base of its table is {theta!r}, which is no number, and it fails on it")
    if kind in dialect.ignored:
        plain = frequencies.geometric(float(theta), rotary_dim)
        return Built(
            plain, 1.0, context, None, (*reasons, f"it does not read the type {kind}, and computes plain RoPE")
        )
    if kind not in dialect.types:
        raise RefusesError(f"it does not know the rope type {kind!r}, and fails on it")
    reasons = [*reasons]
    attention = 1.0
    positions = context
    if kind == "yarn":
        inv_freq = _yarn(parameters, float(theta), rotary_dim, context, dialect, reasons)
        attention = _yarn_factor(parameters, dialect, reasons)
        positions = math.ceil(parameters["factor"] * _original(parameters, context))
        if dialect.counts_positions and positions < context:
            reasons.append(
                f"its table holds factor times original_max_position_embeddings, {positions} positions, and no more"
            )
    elif kind == "longrope":
        lists = len(parameters["long_factor"])
        pairs = rotary_dim // 2
        if lists != pairs:
            raise RefusesError(f"it rotates {pairs} pairs, and fails on the {lists} factors of longrope")
        inv_freq = longrope_table(float(theta), parameters["long_factor"])
        positions = max(context, _original(parameters, context))
        attention = _longrope_factor(parameters, context, dialect, reasons)
    elif kind == "proportional":
        inv_freq = _proportional(parameters, float(theta), head_dim or rotary_dim, dialect, reasons)
    else:
        inv_freq = frequencies.geometric(float(theta), rotary_dim)
        if kind == "linear":
            if isinstance(parameters["factor"], int) and not dialect.whole_factors:
                raise RefusesError("it fails on a factor of linear that is an integer: write 4.0 and not 4")
            inv_freq = inv_freq / parameters["factor"]
            positions = math.ceil(context * parameters["factor"])
        elif kind == "llama3":
            inv_freq = llama3_table(
                inv_freq,
                factor=parameters["factor"],
                low_freq_factor=parameters["low_freq_factor"],
                high_freq_factor=parameters["high_freq_factor"],
                context=_original(parameters, context),
            )
    served, why = dialect.context(config or {"max_position_embeddings": context, "rope_parameters": parameters})
    counted = positions if dialect.counts_positions else None
    return Built(frequencies.zero_unrotated(inv_freq), attention, served, counted, (*reasons, *why))


def _original(parameters: Mapping[str, Any], context: int) -> int:
    return int(parameters.get("original_max_position_embeddings") or context)


def _yarn(
    parameters: Mapping[str, Any], theta: float, rotary_dim: int, context: int, dialect: Dialect, reasons: list[str]
) -> Tensor:
    truncate = bool(parameters.get("truncate", True))
    if not truncate and not dialect.truncates:
        reasons.append("it rounds the ends of YaRN's ramp, whatever truncate says")
        truncate = True
    # A beta of null or 0 counts as missing, as in transformers.
    betas = (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1)
    if betas != (32, 1) and not dialect.obeys_betas:
        reasons.append("it ignores beta_fast and beta_slow of YaRN, and takes 32 and 1")
        betas = (32, 1)
    return yarn_table(
        theta,
        rotary_dim,
        factor=parameters["factor"],
        context=_original(parameters, context),
        beta_fast=betas[0],
        beta_slow=betas[1],
        truncate=truncate,
    )


def _yarn_factor(parameters: Mapping[str, Any], dialect: Dialect, reasons: list[str]) -> float:
    """Return YaRN's attention factor, by which cos and sin are multiplied, from the keys that the program obeys."""
    obeyed = {key: parameters[key] for key in dialect.yarn_keys if parameters.get(key) is not None}
    left_out = [key for key in _EVERY_YARN_KEY if parameters.get(key) is not None and key not in obeyed]
    if left_out:
        reasons.append(f"it ignores {' and '.join(left_out)} of YaRN, and computes 0.1 ln(factor) + 1")
    if "attention_factor" in obeyed:
        return float(obeyed["attention_factor"])
    mscales = []
    if all(key in obeyed for key in MSCALE):
        mscales = [obeyed[key] for key in MSCALE]
    return float(yarn_scaling(parameters["factor"], *mscales))


def _longrope_factor(parameters: Mapping[str, Any], context: int, dialect: Dialect, reasons: list[str]) -> float:
    """Return longrope's attention factor: the one that is stated, or the one that the contexts imply."""
    key = dialect.longrope_key
    if parameters.get(key) is not None:
        return float(parameters[key])
    if parameters.get("attention_factor") is not None:
        reasons.append(
            f"it ignores attention_factor of longrope: {'without short_mscale and long_mscale ' * bool(key)}it "
            "computes a factor from max_position_embeddings over original_max_position_embeddings"
        )
    original = _original(parameters, context)
    grown = context / original
    if key == "attention_factor" and "original_max_position_embeddings" not in parameters:
        # transformers takes the stated factor where no original context is stated, since it cannot compute one.
        grown = float(parameters.get("factor") or 1.0)
    if grown > 1:
        return math.sqrt(1 + math.log(grown) / math.log(original))
    return 1.0


def _proportional(
    parameters: Mapping[str, Any], theta: float, head_dim: int, dialect: Dialect, reasons: list[str]
) -> Tensor:
    inv_freq = frequencies.geometric(theta, head_dim)
    share = parameters.get(SHARE, 1.0)
    factor = parameters.get("factor", 1.0)
    if factor != 1.0 and not dialect.proportional_factor:
        reasons.append("it ignores the factor of proportional")
        factor = 1.0
    if not dialect.proportional_share:
        if share != 1.0:
            reasons.append(f"it ignores the share {share:g} of p-RoPE (proportional), and rotates every pair")
        return inv_freq
    if share <= 0 and not dialect.zero_share:
        raise RefusesError(f"it does not take a {SHARE} of {share:g}")
    inv_freq[int(head_dim * share) // 2 :] = 0.0
    inv_freq /= factor
    return inv_freq
