"""Every measured number of a page is that of the results it names, rounded as the page rounds it.

Below a paragraph a comment of Markdown says where its numbers come from, a line each: the number as the page writes it,
a colon, and a Python expression. Files of benchmarks/results are known by their names, and ``NAME = EXPRESSION``
defines a name for the rest of the page::

    YaRN reads the last half at perplexity 12.4.
    <!-- numbers
    llama = rows(study_methods.rows, checkpoint="llama", factor=4, lora=False)
    12.4: row(llama, table="YaRN").perplexity["1024"]
    -->

``3 to 4 %`` takes the least and the greatest of several values, ``3, 5 and 4`` takes them in this order, and words
without a number take an expression that is true. ``<!-- not measured: 95 %, 0.75 -->`` names settings and
predictions, ``<!-- by hand: 1.4 -->`` what was measured without a file, which the page has to say.

The comments of README.md are in ``numbers_of_readme.md``, under the headings of its sections.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metric import PairedDifference

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)

HELD = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md"))]

COMMENT = re.compile(r"<!-- numbers\n(.*?)-->", re.DOTALL)
WITHOUT = re.compile(r"<!-- (?:not measured|by hand): (.*?) -->", re.DOTALL)
NUMBER = r"(?<![\w.])[-+]?(?:\d+\.\d+|\.\d+|\d+)(?![\w]|\.\d)"
MEASURED = re.compile(r"(?<![\w.])(?:\d+\.\d+|\.\d+|\d+(?= %))(?!\w|\.\d)")
"""A number that looks measured: it has a decimal point, or stands before a percent sign."""


CODE = r"`[^`\n]*`"
NAMES = re.compile(r"arXiv:[\d.]+\d|(?:Apache|CPython|Llama|Python|section|SmolLM2)[ -]\d+(?:\.\d+)*\w*")
"""Names with a number in them."""


class Row(dict):
    """A JSON object whose keys are attributes, too."""

    def __getattr__(self, name):
        return self[name]


def rows(objects, **like):
    """The objects of a list in which the named keys have these values."""
    return [one for one in objects if all(one[key] == value for key, value in like.items())]


def row(objects, **like):
    """The only one of them."""
    (one,) = rows(objects, **like)
    return one


def percent(nll):
    """A difference of losses [nats/token] as a change of perplexity [%]; of each, if there are several."""
    return [percent(one) for one in nll] if isinstance(nll, list) else 100 * math.expm1(nll)


def paired(ours, theirs):
    """The difference of two lists of losses that belong together, with its 95 % interval [nats/token]."""
    estimate = statistics.fmean(a - b for a, b in zip(ours, theirs, strict=True))
    return PairedDifference(estimate, *paired_means(ours, theirs))


@pytest.fixture(scope="module")
def known():
    """What expressions may name."""
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8"), object_hook=Row) for path in files}
    return reports | {
        "math": math,
        "statistics": statistics,
        "rows": rows,
        "row": row,
        "percent": percent,
        "paired": paired,
    }


def disagreement(text: str, value: object) -> str | None:
    """Why a number as it is written is not a value; None where it is."""
    written = [number.lstrip("+") for number in re.findall(NUMBER, text)]
    if not written:
        return None if value is True else f"{text!r} is not so: {value!r}"
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if " to " in text and len(written) == 2:
        written, values = sorted(written, key=float), [min(values), max(values)]
    if len(values) != len(written):
        return f"{text!r} has {len(written)} numbers, its expression {len(values)}"
    for number, one in zip(written, values, strict=True):
        digits = len(number.partition(".")[2])
        if abs(one - float(number)) > 0.5 * 10**-digits * (1 + 1e-6):
            return f"{text!r}: {number} is {one:.6g}"
    return None


def prose(page: str) -> str:
    """A page without code, tables that a script writes, targets of links, and comments that are not about numbers."""
    page = re.sub(r"```.*?```", " ", page, flags=re.DOTALL)
    page = re.sub(r"<!-- table .*?<!-- end -->", " ", page, flags=re.DOTALL)
    comments = {}

    def marked(match: re.Match[str]) -> str:
        comments[f"\0{len(comments)}\0"] = match[0]
        return list(comments)[-1]

    page = COMMENT.sub(marked, page)
    page = re.sub(rf"{CODE}|(?<=\])\([^)]*\)|<!--.*?-->", " ", page, flags=re.DOTALL)
    page = re.sub(NAMES, " ", page)
    for mark, comment in comments.items():
        page = page.replace(mark, comment)
    return page


def parts(page: str) -> Iterator[tuple[str, list[str]]]:
    """What stands above each comment, from the one before it or from the last heading, and the lines of the comment."""
    text, end = prose(page), 0
    for match in [*COMMENT.finditer(text), None]:
        *before, above = re.split(r"^#+ .*$", text[end : match.start() if match else None], flags=re.MULTILINE)
        yield from ((one, []) for one in before)
        yield above, match[1].strip().splitlines() if match else []
        end = match.end() if match else end


def problems(page: str, known: dict[str, object]) -> list[str]:
    """What is wrong with the numbers of a page, a line each."""
    wrong, names = [], dict(known)
    without = {number for match in WITHOUT.finditer(page) for number in re.findall(NUMBER, match[1])}
    for text, lines in parts(page):
        words, named = " ".join(text.split()), set()
        for line in lines:
            if re.match(r"[\w, ]+ = ", line):
                exec(line, names)
                continue
            label, _, expression = line.partition(": ")
            label = " ".join(re.sub(CODE, " ", label).split())
            if not re.search(rf"(?<![\w.]){re.escape(label)}(?!\w|\.\d)", words):
                wrong.append(f"{label!r} is not above its comment")
            elif why := disagreement(label, eval(expression, names)):
                wrong.append(why)
            named |= {number.lstrip("+-") for number in re.findall(NUMBER, label)}
        wrong += [f"{number} names no result" for number in MEASURED.findall(words) if number not in named | without]
    return wrong


def sections(page: str) -> list[str]:
    """The sections of a page; each begins with its heading."""
    return re.split(r"^(?=#+ )", page, flags=re.MULTILINE)


def with_comments(page: str, comments: str) -> str:
    """A page with the comments that another one has under the same headings, at the ends of the sections.

    Raises:
        KeyError: a heading that the page does not have.
    """
    by_heading = {section.partition("\n")[0]: section for section in sections(page)}
    for section in sections(comments):
        heading, _, comment = section.partition("\n")
        by_heading[heading] = by_heading[heading] + comment
    return "".join(by_heading.values())


@pytest.mark.parametrize("page", HELD)
def test_measured_numbers_are_those_of_the_results(page, known):
    text = (ROOT / page).read_text(encoding="utf-8")
    if page == "README.md":
        text = with_comments(text, (ROOT / "tests" / "numbers_of_readme.md").read_text(encoding="utf-8"))
    assert problems(text, known) == []


@pytest.mark.parametrize(
    ("text", "comment", "problem"),
    [
        ("It is 12.4.", "12.4: result.value", None),
        ("It is 12.5.", "12.5: result.value", "'12.5': 12.5 is 12.4321"),
        ("It is 12.", "12: result.value", None),
        ("It is 13.", "12: result.value", "'12' is not above its comment"),
        ("It falls by 3 to 5 %.", "3 to 5 %: [3.2, 5.4, 4]", None),
        ("It falls by 3 to 5 %.", "3 to 5 %: [3.2, 5.6, 4]", "'3 to 5 %': 5 is 5.6"),
        ("It is .91 and .96.", ".91 and .96: [.911, .954]", "'.91 and .96': .96 is 0.954"),
        ("None is found.", "None: result.zero == 0", None),
        ("None is found.", "None: result.value == 0", "'None' is not so: False"),
        ("It is 12.4, then 8 %.", "12.4: result.value", "8 names no result"),
        ("`4.5` of version 5.23.0 in [this](a/1.5.md).", "this: True", None),
    ],
)
def test_what_a_comment_must_be(text, comment, problem):
    result = Row(value=12.4321, zero=0)
    found = problems(f"{text}\n<!-- numbers\n{comment}\n-->\n", {"result": result})
    assert found == ([] if problem is None else [problem])


def test_a_comment_is_of_the_text_right_above_it():
    above = "It is 1.5.\n<!-- numbers\n1.5: 1.5\n-->\n"
    assert problems(f"{above}\nNow 2.5.\n", {}) == ["2.5 names no result"]
    assert problems(f"It is 1.5.\n\n## Next\n\n{above}", {}) == ["1.5 names no result"]
    assert problems(f"{above}\nNow 2.5.\n<!-- not measured: 2.5 -->", {}) == []


def test_comments_under_the_same_heading_are_of_the_section():
    page = with_comments("# One\n\nIt is 1.5.\n\n## Two\n\nIt is 2.5.\n", "## Two\n\n<!-- numbers\n2.5: 2.6\n-->\n")
    assert problems(page, {}) == ["1.5 names no result", "'2.5': 2.5 is 2.6"]
    with pytest.raises(KeyError):
        with_comments("# One\n", "# Three\n")
