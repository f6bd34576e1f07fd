"""The terms of a report: linked where a text first uses them, and explained at its end."""

from __future__ import annotations

import functools
import json
import re

from markupsafe import Markup, escape

from rope_patch.packaged import data_path


@functools.cache
def glossary() -> dict[str, str]:
    """Return what each term means; ``docs/concepts.md`` says the same."""
    terms: dict[str, str] = json.loads((data_path("assets") / "glossary.json").read_text(encoding="utf-8"))
    return terms


@functools.cache
def _terms() -> re.Pattern[str]:
    longest_first = sorted(glossary(), key=len, reverse=True)
    words = "|".join(map(re.escape, longest_first))
    # Not within a method such as yarn:factor=2, or the name of a model.
    return re.compile(rf"(?<![\w:+/-])({words})s?(?![\w=/-])", re.IGNORECASE)


class Terms:
    """The terms that one page has used so far."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def link(self, text: str) -> Markup:
        """Return a text, escaped, in which the terms that the page did not use before are links to their meaning."""
        parts, end = [], 0
        for match in _terms().finditer(text):
            term = next(name for name in glossary() if name.lower() == match[1].lower())
            if term not in self._used:
                self._used.add(term)
                link = Markup('<a class="term" href="#term-{}">{}</a>').format(self.name(term), match[0])
                parts += [escape(text[end : match.start()]), link]
                end = match.end()
        return Markup("").join([*parts, escape(text[end:])])

    def name(self, term: str) -> str:
        """Return the id of a term in links."""
        return term.lower().replace(" ", "-")

    def used(self) -> list[tuple[str, str, str]]:
        """Return id, term and meaning of the terms that were used, in alphabetical order."""
        return [(self.name(term), term, glossary()[term]) for term in sorted(self._used, key=str.lower)]
