"""The options of ``rope-patch theory``."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, number, tokens, whole, word


@dataclass(frozen=True)
class TheoryOptions(OptionSet, command="theory"):
    """Print what a rotary table implies, before a method and after it.

    It covers wavelengths, how many pairs make no full turn within the trained context, how well positions can be told
    apart, and what it takes to build a previous-token head from the table. It takes seconds on a CPU.

    Example: ``rope-patch theory --method yarn:factor=4 --rope-theta 500000 --trained-length 8k --length 32k``
    """

    model: str | None = word(
        "A checkpoint whose config states the table, without its weights: a local folder, a Hugging Face hub id or a "
        "GGUF file. Without one the table is plain RoPE of --head-dim and --rope-theta.",
        None,
        metavar="MODEL",
        positional=True,
    )
    method: str = word(
        "The method to study, for example yarn:factor=4. rope-patch methods lists all of them; default is the table as "
        "it is.",
        "default",
        metavar="METHOD",
    )
    head_dim: int | None = whole(
        "The number of features of an attention head, 128 by default; all of them are rotated.", None, least=2
    )
    rope_theta: float | None = number(
        "The base of the rotary table before the method is applied, 10000 by default.", None, above=1
    )
    trained_length: int | None = tokens(
        "The context length that the model was trained at: by default the config's, or 4096 without MODEL.",
        None,
        least=2,
    )
    length: int | None = tokens(
        "The context length at which the model is used: by default 4 times that.", None, least=2
    )
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.model is not None and (self.head_dim is not None or self.rope_theta is not None):
            raise ValueError("--head-dim and --rope-theta describe a table without MODEL: leave them out")
