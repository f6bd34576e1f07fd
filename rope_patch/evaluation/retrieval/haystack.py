"""The haystack: the text that needles are hidden in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options.evaluation import DEFAULT_HAYSTACK as DEFAULT_HAYSTACK
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import text_digest, whole_text

NOISE = "The road goes on and on. The hill is far away. We walk all day. Then we rest a while, and walk on again. "
"""The sentences that the haystack ``"noise"`` repeats."""


@dataclass(frozen=True)
class Haystack:
    """A text that needles are hidden in.

    Attributes:
        text: the text that needles are hidden in.
        name: name of the text in results.
        endless: whether the text is repeated if it is too short. Only noise is: a text with content said twice would be
            another task.
    """

    text: str
    name: str = "text"
    endless: bool = False

    @property
    def sha256(self) -> str:
        """Digest of the text."""
        return text_digest(self.text)

    @classmethod
    def of(cls, source: str | Path | Haystack) -> Haystack:
        """Return the haystack called ``"builtin"`` or ``"noise"``, or that of a file or folder.

        Raises:
            FileNotFoundError: the file or folder does not exist.
            ValueError: there is no text.
        """
        match source:
            case Haystack():
                haystack = source
            case "builtin":
                haystack = cls(builtin_text("haystack").text, "builtin")
            case "noise":
                haystack = cls(NOISE, "noise", endless=True)
            case _:
                path = Path(source).expanduser()
                haystack = cls(whole_text(path), path.name)
        if not haystack.text.strip():
            raise ValueError("the haystack is empty")
        return haystack
