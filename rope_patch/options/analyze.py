"""The options of ``rope-patch analyze``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import contained, flag, number, option, path, tokens
from rope_patch.options.shared import CommandOptions, Machine, Patching

TOKENS = 16384
"""Number of tokens that the statistics read at most by default."""
P_VALUES = (0.9, 0.75, 0.5, 0.25)
"""Values of p of p-RoPE that are looked at by default."""


def read_head(text: str) -> tuple[int, int]:
    """Return layer and head of a text such as "3.0".

    >>> read_head("3.0")
    (3, 0)
    """
    layer, _, head = text.partition(".")
    # isdigit is true of signs such as ², too, which int refuses.
    if not (text.isascii() and layer.isdigit() and head.isdigit()):
        raise ValueError(f"a head is given as layer.head, such as 3.0, got {text!r}")
    return int(layer), int(head)


@dataclass(frozen=True)
class AnalyzeOptions(CommandOptions, command="analyze"):
    """Analyze how the attention heads of a model use its rotary table, and what p-RoPE would take from them.

    It finds positional heads, features with outliers, and attention sinks. It writes ``analysis.json``,
    ``capture.npz``, ``heads.npz``, ``single_heads.npz`` and ``analysis.html``.

    Example: ``rope-patch analyze ./llama --text ./articles --text ./code -o ./analysis``
    """

    models: tuple[str, ...] = shared.model(
        " Of several, each gets a folder of its own, and one table shows all.", name="model", repeated=True
    )
    texts: tuple[Path, ...] = path(
        "A text file, or a folder of .txt files, to run the model on. Repeat it for more: the statistics read as much "
        "of each, and are of all together; capture.npz has the norms of each. By default short built-in texts of "
        "five kinds.",
        (),
        name="text",
        repeated=True,
    )
    heads: tuple[tuple[int, int], ...] = option(
        'The attention heads to show in detail, as layer.head, for example "1.2 3.0". single_heads.npz has their '
        "queries, keys and logits on all of the text. By default the clearest example of each type, on its beginning.",
        (),
        metavar="HEADS",
        read=read_head,
        several=True,
    )
    p_values: tuple[float, ...] = number(
        'The values of p of p-RoPE for which to show what the pairs carry that would stop rotating. "" shows none.',
        P_VALUES,
        metavar="VALUES",
        name="p",
        several=True,
        empty=True,
        above=0,
        below=1,
    )
    tokens_read: int = tokens(
        "How much text the statistics read; at least one row of each text is.",
        TOKENS,
        least=2,
        name="tokens",
    )
    window: int | None = tokens(
        "The length of the rows that the text is cut into. By default the context length of the model, but at most 2k.",
        None,
        least=2,
    )
    method: str | None = shared.method()
    patching: Patching = contained(Patching)
    output: Path = shared.output("rope-patch-analysis")
    machine: Machine = contained(Machine)
    report: bool = shared.report()
    all_figures: bool = flag(
        "Draw further figures: the length of each pair's mean by layer; and, of each single head, what its pairs add "
        "to the logit by distance, and its longest pair token by token."
    )
