"""The options of ``rope-patch analyze``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, contained, number, option, path, tokens, word
from rope_patch.options.shared import Machine, Patching

P_VALUES = (0.9, 0.75, 0.5, 0.25)
"""Values of p of p-RoPE that are looked at by default."""
_MOST_LAYERS = 10_000  # more than any model has: 0-999999999 would fill the memory


def read_layers(text: str) -> tuple[int, ...] | None:
    """Return the layers that a text such as "0 3-5" names; None for an empty text, which means all.

    >>> read_layers("0 3-5"), read_layers("")
    ((0, 3, 4, 5), None)
    """
    indices: set[int] = set()
    for item in text.replace(",", " ").split():
        first, dash, last = item.partition("-")
        if not dash:
            last = first
        if not (_whole(first) and _whole(last)) or int(first) > int(last) or int(last) >= _MOST_LAYERS:
            raise ValueError(f"layers are numbers and ranges such as '0 3-5', got {item!r}")
        indices.update(range(int(first), int(last) + 1))
    return tuple(sorted(indices)) or None


def read_head(text: str) -> tuple[int, int]:
    """Return layer and head of a text such as "3.0".

    >>> read_head("3.0")
    (3, 0)
    """
    layer, _, head = text.partition(".")
    if not _whole(layer) or not _whole(head):
        raise ValueError(f"a head is given as layer.head, such as 3.0, got {text!r}")
    return int(layer), int(head)


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit()


@dataclass(frozen=True)
class AnalyzeOptions(OptionSet, command="analyze"):
    """Analyze how the attention heads of a model use its rotary table, and what p-RoPE would take from them.

    It finds positional heads, features with outliers, and attention sinks. It writes ``analysis.json``,
    ``capture.npz``, ``heads.npz`` and ``analysis.html``. If it is interrupted, run it again to continue: finished work
    is saved in the output folder.

    Example: ``rope-patch analyze ./llama --text ./articles --text ./code -o ./analysis``
    """

    model: str = shared.model()
    texts: tuple[Path, ...] = path(
        "A text file, or a folder of text files, to run the model on. Repeat it for more: the statistics read as much "
        "of each, and are of all together; the page shows the norms of each text. By default short built-in texts of "
        "five kinds.",
        (),
        name="text",
        repeated=True,
    )
    pattern: str = word("Which files of a --text folder are read.", "**/*.txt", metavar="GLOB")
    layers: Sequence[int] | None = option(
        'The layers to analyze, for example "0 3-5". By default all of them.',
        None,
        metavar="LAYERS",
        read=read_layers,
    )
    heads: tuple[tuple[int, int], ...] = option(
        'The attention heads to show in detail, as layer.head, for example "1.2 3.0". By default the clearest example '
        "of each type.",
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
    tokens_read: int | None = tokens(
        "How much text the statistics read; at least one row of each text is. By default 16k, or less for a large "
        "model.",
        None,
        least=2,
        name="tokens",
    )
    window: int | None = tokens(
        "The length of the rows that the text is cut into. By default the context length of the model, but at most 2k.",
        None,
        least=2,
    )
    chunk: int | None = shared.chunk()
    method: str | None = shared.method()
    patching: Patching = contained(Patching)
    output: Path = shared.output("rope-patch-analysis")
    machine: Machine = contained(Machine)
    report: bool = shared.report()
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()

    def __post_init__(self) -> None:
        """Check the values, and drop repeated heads and values of p."""
        super().__post_init__()
        for name in ("heads", "p_values"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
