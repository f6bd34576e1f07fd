"""What all reports share: one file that loads nothing, everything escaped, colours that can be read."""

import matplotlib.image
from support.report_pages import Page as Parsed
from support.report_pages import accessible, loads_nothing

from rope_patch.runtime.page import Cell, DataTable, Figure, Note, Page, Section, render, short_names, write
from rope_patch.runtime.plots import WIDTH, line_styles, new_figure

EVIL = '<script>alert("1")</script>&$x$'
CELLS = [
    "plain",
    Cell("a:b+c", style="text"),
    Cell("1", "0 to 2", "winner"),
    Cell("1", style="tied"),
    Cell(" x", style="token"),
]


def a_page(text="words", **table):
    shown = DataTable(**{"title": "Scores", "columns": list("abcde"), "rows": [CELLS], "caption": "How.", **table})
    figure = Figure(lambda: new_figure("A figure", 4.0), "A figure", "How to read it, in a sentence of its own.")
    return Page(text, [Section(text, [text, text], [Note(text), figure, shown]), Section("Empty", [], [])])


def test_a_page_is_one_file_that_can_be_read_by_keyboard_and_ear():
    text = render(a_page(), "command")
    assert text == render(a_page(), "command")
    loads_nothing(text)
    accessible(text)
    assert [given["href"] for given in Parsed(text).all("a")] == ["#section-1", "#section-2"]


def test_cells_have_their_styles_and_notes():
    (cells,) = Parsed(render(a_page())).tables["Scores"][1:]
    assert cells == [("", "plain"), ("text", "a:b+c"), ("winner", "★ 10 to 2"), ("tied", "≈ 1"), ("token", " x")]


def test_a_folded_table_opens_by_its_title():
    assert "<summary>Scores</summary>" in render(a_page(folded=True))
    assert "<h3>Scores</h3>" in render(a_page())


def test_a_table_without_rows_has_a_head():
    assert Parsed(render(a_page(rows=[]))).table("Scores") == [list("abcde")]


def test_hostile_names_are_text():
    text = render(
        a_page(EVIL, title=EVIL, caption=EVIL, columns=("", EVIL), rows=[[EVIL, Cell(EVIL, EVIL, "text")]]), EVIL
    )
    assert "<script" not in text
    assert "".join(Parsed(text).text).count(EVIL) >= 10


def test_twins_stay_two():
    names = ["x" * 200, "x" * 100, "y"]
    assert len(set(short_names(names).values())) == 3
    assert max(map(len, short_names(names).values())) < 100


def test_figures_stand_beside_the_page_as_png_and_svg_and_those_of_an_earlier_page_go(tmp_path):
    folder = tmp_path / "page-figures"
    folder.mkdir()
    for name in ("01-an-older-figure.png", "mine.png"):
        (folder / name).write_bytes(b"")
    write(tmp_path / "page.html", a_page())
    assert sorted(path.name for path in folder.iterdir()) == ["01-a-figure.png", "01-a-figure.svg", "mine.png"]
    height, width, _ = matplotlib.image.imread(folder / "01-a-figure.png").shape
    assert width == 150 * WIDTH and height > 500
    write(tmp_path / "empty.html", Page("No figure", []))
    assert not (tmp_path / "empty-figures").exists()


def test_lines_of_many_names_differ():
    numbered = line_styles([f"format {i}" for i in range(20)]).values()
    assert len({(style["color"], style["linestyle"]) for style in numbered}) == 20
