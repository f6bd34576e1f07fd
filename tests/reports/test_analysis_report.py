"""The page of an analysis: numbers where they belong, bounds at their pair, tokens that are seen and do no harm."""

import itertools
import math
import re
from dataclasses import replace

import numpy
import pytest
import torch
from support.prompting import TOKENIZER
from support.report_pages import Page, accessible, loads_nothing
from support.tiny import small

from rope_patch import frequencies
from rope_patch.analysis.analyze import analyze
from rope_patch.analysis.heads import Heads, LayerHeads
from rope_patch.analysis.outliers import contributions, mean_pairs
from rope_patch.analysis.p_sweep import SweepPoint
from rope_patch.analysis.result import Analysis, findings
from rope_patch.analysis.single_heads import SingleHead
from rope_patch.modeling.state_statistics import Capture, LayerCapture, Statistics
from rope_patch.reports import analysis as analysis_report
from rope_patch.reports import analysis_figures
from rope_patch.reports.analysis import shown_token
from rope_patch.reports.plots.analysis import Map, bound_edges, heat_maps, pair_map
from rope_patch.runtime.page import Figure, render, write
from rope_patch.texts.domains import TextRows

WORDS = {0: "<s>", 1: " the", 2: "\n", 3: "$x$", 4: "<script>", 5: "字"}
NO_NUMBER = re.compile(r"\b(nan|inf)\b|\bNone\b(?! of)")


def random_statistics(draw, heads):
    mean = draw(heads, 16) - 0.5
    mean[0, 7] = 9.0  # an outlier among the slow pairs
    return Statistics(
        mean=mean,
        mean_norm=1 + draw(heads, 8),
        largest=10 * draw(heads, 16),
        text_norm=1 + draw(heads, 2, 8),
        circular_deviation=2 * draw(heads, 8),
        interleaved=False,
    )


def random_heads(draw, index, heads):
    """Head 0 attends to its own token, head 1 to the previous one, head 2 rests on the first, head 3 does nothing."""
    offset = 0.05 * draw(heads, 8)
    offset[0, 0] = 0.91
    offset[1, 1] = 0.82
    first = 0.1 * draw(heads)
    first[2] = 0.73
    sink_weight = 0.2 * draw(heads, 4)
    sink_weight[2, 0] = 0.64
    token = torch.arange(heads * 4).view(heads, 4) % len(WORDS)
    token[2, 0] = 0
    return LayerHeads(
        index=index,
        offset_mass=offset,
        logit=torch.full_like(offset, 7.0 + index),
        logit_spread=torch.full_like(offset, 0.5),
        logit_bound=torch.full_like(offset, 9.5),
        key_mass=torch.ones(heads, dtype=torch.float64),
        first_mass=first,
        sink_mass=0.1 * draw(heads),
        sink_position=torch.arange(4).expand(heads, 4).clone(),
        sink_token=token,
        sink_weight=sink_weight,
        induction_mass=0.3 * draw(heads),
        distance=100 * draw(heads),
        entropy=5 * draw(heads),
    )


def random_analysis(*, context=256, **changes):
    """An analysis of three layers with 8 pairs, of random numbers."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(*shape, generator=source, dtype=torch.float64)

    captured = []
    attended = []
    for index in range(3):
        captured.append(
            LayerCapture(
                index=index,
                layer_type=None,
                inv_freq=frequencies.geometric(1e4, 16),
                attention_scaling=1.0,
                context=context,
                scaling=0.25,
                softcap=None,
                keys_of=index,
                query=random_statistics(draw, 4),
                key=random_statistics(draw, 2),
                value=random_statistics(draw, 2),
            )
        )
        attended.append(random_heads(draw, index, 4))
    ids = torch.arange(24) % len(WORDS)
    view = SingleHead(
        layer=0,
        head=1,
        token_ids=ids[None],
        query=draw(1, 24, 16),
        key=draw(1, 24, 16),
        inv_freq=captured[0].inv_freq,
        attention_scaling=1.0,
        scaling=0.25,
        softcap=None,
        window=None,
        sink=None,
        interleaved=False,
    )
    points = (
        SweepPoint(0.75, {"all": (6, 7)}, 0.21, 0.22, 0.18, 6, 6),
        SweepPoint(0.25, {"all": (2, 3, 4, 5, 6, 7)}, 0.6, 0.7, 0.65, 6, 2),
    )
    analysis = Analysis(
        name="Some model",
        table="the table",
        method=None,
        context=context,
        rows=TextRows(ids.expand(2, 24), ("first", "second $"), "a text", "ab" * 32),
        capture=Capture("TinyForCausalLM", 48, 2, "c" * 16, tuple(captured)),
        heads=Heads(tuple(attended)),
        single_heads=(view,),
        p_sweep=points,
        biases=(),
        token_texts=WORDS,
        environment={"torch": "2"},
    )
    return replace(analysis, **changes)


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page():
    """The page of random numbers, whose figures are not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "source", "")
        return Page(render(analysis_report.page(random_analysis())))


def test_the_page_is_whole_and_loads_nothing():
    analysis = random_analysis()
    text = render(analysis_report.page(analysis), "rope-patch analyze <x>")
    loads_nothing(text)
    accessible(text)
    page = Page(text)
    # Masses, norms by head and by layer, every pair, by distance, largest features, view.
    assert len(page.all("img")) == 7
    words = "".join(page.text)
    assert "Some model" in words
    facts = dict(page.table("What was measured")[1:])
    assert facts["Rows"] == "2 of 24 tokens, 48 in all"
    for finding in findings(analysis):
        assert finding in words


def test_tokens_are_seen_and_do_no_harm(page):
    rows = page.table("The text of these figures, 24 tokens")[1:]
    token_names = ["<s>", "␣the", r"\n", "$x$", "<script>", "字"]
    assert rows[0] == ["0", "  ".join((token_names * 3)[:8])]
    assert rows[1][0] == "8"
    assert shown_token(replace(random_analysis(), token_texts={7: "a\tb\x00\u202e"}), 7) == r"a\tb\x00\u202e"
    assert shown_token(replace(random_analysis(), token_texts={7: ""}), 7) == "(empty)"


def test_findings_have_the_numbers_of_the_analysis():
    analysis = random_analysis()
    *_, stopped, cache = findings(analysis)
    assert re.findall(r"(\d+) %", stopped) == ["21", "22"]
    keys = [layer.key for layer in analysis.capture.layers]
    heads = [head for key in keys for head in zip(key.largest.tolist(), key.mean_norm.tolist(), strict=True)]
    ratios = sorted(max(largest) / numpy.mean(norms) for largest, norms in heads)
    assert f" {ratios[(len(ratios) - 1) // 2]:.0f} times" in cache


def test_numbers_of_heads_are_those_of_the_analysis(page):
    analysis = random_analysis()
    rows = {row[0]: row for row in page.table("Positional heads, and heads that do induction")[1:]}
    assert set(rows) == {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1"}, "heads that rest on the first token are no such"
    layer = analysis.heads.layer(1)
    assert rows["1.1"][1:4] == ["previous token", "1", f"{float(layer.offset_mass[1, 1]):.2f}"]
    assert rows["1.1"][4:] == [f"{float(layer.induction_mass[1]):.2f}", "8.0 of 9.5± 0.5"]
    assert page.table("Sinks")[1:] == [["<s>", "0", "3", "0.64"]]


def test_numbers_of_outliers_and_p_are_those_of_the_analysis(page):
    analysis = random_analysis()
    assert len(analysis.outliers("key")) == 6  # one key head in each of three layers, for two query heads
    rows = page.table("Outliers inside the bounds")[1:]
    assert [row[:2] for row in rows[:3]] == [["keys", "6.0"], ["keys", "9.0"], ["keys", "12.0"]]
    assert [row[2] for row in rows[:4]] == ["6", "6", "0", "6"] and rows[2][3:] == ["–"] * 3
    beyond = sum(pair.phi > pair.angle for pair in analysis.outliers("key"))
    nearly = sum(pair.phi > pair.angle - 0.1 for pair in analysis.outliers("key"))
    assert rows[0][3:] == ["1.00", f"{beyond / 6:.2f}", f"{nearly / 6:.2f}"]
    middle, most = page.table("The p sweep")[1:]
    assert middle == ["0.75", "6 to 7 (all layers)", "21.0 %", "22.0 %", "18.0 %", "6 of 6"]
    assert most[:2] == ["0.25", "2 to 7 (all layers)"]


def test_nothing_found_is_said(figures):
    """No head types, sinks, outliers or p sweep."""
    analysis = random_analysis(p_sweep=())
    none = ("offset_mass", "first_mass", "sink_mass", "sink_weight")
    zeros = [{name: torch.zeros_like(getattr(layer, name)) for name in none} for layer in analysis.heads.layers]
    idle = [replace(layer, **values) for layer, values in zip(analysis.heads.layers, zeros, strict=True)]

    def flat(statistics):
        return replace(statistics, mean=torch.ones_like(statistics.mean))

    even = [replace(layer, query=flat(layer.query), key=flat(layer.key)) for layer in analysis.capture.layers]
    heads = replace(analysis.heads, layers=tuple(idle))
    capture = replace(analysis.capture, layers=tuple(even))
    words = "".join(Page(render(analysis_report.page(replace(analysis, heads=heads, capture=capture)))).text)
    assert "0 of 12 heads" in words and "No head has a sink" in words
    assert not NO_NUMBER.search(words)
    assert len(figures) == 7
    assert "No head is positional" in words


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_bound_is_drawn_between_its_pairs():
    phi_1 = frequencies.geometric(1e4, 32)
    assert bound_edges(phi_1, 2048) == [10.5]  # Jonasson: pairs 11 to 15
    assert bound_edges(frequencies.geometric(1e4, 128), 4096) == [45.5]  # Llama-2-7B: pairs 46 to 63
    assert bound_edges(torch.cat((torch.zeros(3), phi_1[3:])), 2048) == [2.5, 10.5]  # the fastest are unrotated
    assert bound_edges(phi_1, 1) == bound_edges(torch.ones(4), 64) == []
    panel = pair_map("norms", torch.rand(2, 16), {0: "0", 1: "1"}, phi_1, 2048)
    figure = heat_maps([[panel]], title="t", xlabel="x", ylabel="y", label="norm")
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [10.5, 10.5]


def test_heat_maps_show_their_values_and_clip_few():
    values = torch.ones(10, 50, dtype=torch.float64)
    values[0, 0] = 100.0
    values[1, 1] = math.nan
    figure = heat_maps(
        [[Map("a", values, {9: "9"}, {0: "0"}), Map("b", values / 2, {9: "9"}, {0: "0"})]],
        title="t", xlabel="x", ylabel="y", label="one",
    )  # fmt: skip
    left, right = (axes.images[0] for axes in figure.axes[:2])
    assert left.get_array().mask.nonzero()[0].tolist() == [1]
    assert left.get_array()[0, 0] == 100
    assert (left.norm.vmin, left.norm.vmax) == (0, 1)  # 1 of 499 values is larger: it has the last colour
    assert left.colorbar.extend == "max"
    assert right.norm.vmax == pytest.approx(0.5, abs=1e-12)
    assert [axes.get_ylim() for axes in figure.axes[:2]] == [(9.5, -0.5)] * 2  # layer 0 above


def bars_of(figure):
    """The panels of what each pair adds to the logit."""
    return [axes for axes in figure.axes if "adds to the logit" in axes.get_title(loc="left")]


def test_a_view_shows_its_head():
    analysis = random_analysis()
    view = analysis.single_heads[0].shown
    shown = analysis_figures.single_head(analysis, replace(view, window=6))
    drawn = shown.draw()
    query, key, *_ = [axes.images[0] for axes in drawn.axes if axes.images]
    numpy.testing.assert_allclose(query.get_array().data, view.norms(view.query))
    numpy.testing.assert_allclose(key.get_array().data, view.norms(view.key))
    pattern = next(axes.images[0] for axes in drawn.axes if axes.get_title(loc="left") == "Attention")
    numpy.testing.assert_array_equal(pattern.axes.images[1].get_array(), pattern.get_array()[:, :1])
    left, right, *_ = pattern.axes.images[1].get_extent()
    assert right - left > 1.5, "the first key is wider than the others"
    hidden = pattern.get_array().mask
    assert hidden[3, 4] and not hidden[3, 3] and not hidden[10, 5] and hidden[10, 4]
    bars = bars_of(drawn)
    for axes, distance in zip(bars, (0, 1), strict=True):
        heights = [bar.get_height() for bar in axes.patches]
        numpy.testing.assert_allclose(heights, view.mean_terms(distance))
        mean = float(view.logits.diagonal(-distance).mean())
        assert sum(heights) == pytest.approx(mean)
        assert f"{mean:.2f}".replace("-", "−") in shown.caption


def test_a_head_that_rests_on_the_first_token_is_shown_beside_the_other_keys():
    analysis = random_analysis()
    shown = replace(analysis.single_heads[0].shown, head=2)
    drawn = analysis_figures.single_head(analysis, shown).draw()
    bars = bars_of(drawn)
    assert "the first key" in bars[0].get_title(loc="left") and "the keys after it" in bars[1].get_title(loc="left")
    for axes, terms in zip(bars, shown.sink_terms(), strict=True):
        numpy.testing.assert_allclose([bar.get_height() for bar in axes.patches], terms)


def test_every_pair_is_a_point_between_both_bounds():
    analysis = random_analysis()
    drawn = analysis_figures.outliers(analysis).draw()
    assert len(drawn.axes) == 6
    for row, states in enumerate(("query", "key")):
        left, middle, right = drawn.axes[3 * row : 3 * row + 3]
        pairs = mean_pairs(analysis.capture, states)
        for axes, x, y in ((left, "phi", "radius"), (middle, "turns", "phi"), (right, "radius", "deviation")):
            points = [tuple(at) for collection in axes.collections for at in collection.get_offsets().tolist()]
            numpy.testing.assert_allclose(sorted(points), sorted((getattr(p, x), getattr(p, y)) for p in pairs))
        assert [list(line.get_ydata()) for line in middle.lines[:1]] == [[math.pi, 2 * math.pi]]
        assert list(middle.lines[1].get_xdata()) == [1, 1]


def test_the_longest_pairs_are_drawn_over_distance_once_for_a_key_head():
    analysis = random_analysis(context=40)
    drawn = analysis_figures.by_distance(analysis).draw()
    assert len(drawn.axes) == 4 and len({axes.get_title(loc="left") for axes in drawn.axes}) == 4
    pair = mean_pairs(analysis.capture)[0]
    layer = analysis.capture.layer(pair.layer)
    logits = contributions(layer, pair.head, torch.arange(40))
    every, one, others = drawn.axes[0].lines
    distances = [int(x) for x in every.get_xdata()] + [40]
    for name, line in (("one", one), ("every", every)):
        values = logits[pair.pair] if name == "one" else logits.sum(0)
        means = [float(values[a:b].mean()) for a, b in itertools.pairwise(distances)]
        numpy.testing.assert_allclose(line.get_ydata(), means)
    numpy.testing.assert_allclose(others.get_ydata(), every.get_ydata() - one.get_ydata())


def test_a_mean_head_is_drawn_over_distance_and_its_longest_pair_by_token():
    analysis = random_analysis(context=40)
    (head,) = analysis.single_heads
    drawn = analysis_figures.mean_head(analysis, head).draw()
    every, sums, states, *_ = drawn.axes
    layer = analysis.capture.layer(0)
    logits = contributions(layer, 1, torch.arange(80)).numpy()
    edges = [int(x) for x in sums.lines[0].get_xdata()] + [80]
    shares = numpy.exp(logits.sum(0)) / numpy.exp(logits.sum(0)).sum()
    for line, values in ((sums.lines[0], logits.sum(0)), (drawn.axes[-1].lines[0], shares)):
        means = [values[a:b].mean() for a, b in itertools.pairwise(edges)]
        numpy.testing.assert_allclose(line.get_ydata(), means, rtol=1e-6)
    cells = every.collections[0].get_array()
    numpy.testing.assert_allclose(cells[:, 0], logits[:, 1])
    queries, keys, first = (points.get_offsets() for points in states.collections)
    longest = int(layer.key.radius[0].argmax())  # key head 0 serves query heads 0 and 1
    numpy.testing.assert_allclose(queries, head.query[0][:, [longest, longest + 8]])
    numpy.testing.assert_allclose(keys, head.key[0][:, [longest, longest + 8]])
    numpy.testing.assert_allclose(first[0], keys[0])


def test_all_figures_are_further_ones():
    analysis = random_analysis()
    plain, whole = (analysis_report.page(analysis, all_figures=all_figures) for all_figures in (False, True))
    assert [section.title for section in whole.sections[:-1]] == [section.title for section in plain.sections]
    radii, _ = whole.sections[-1].parts
    keys = radii.draw().axes[1].images[0].get_array()
    expected = [torch.hypot(layer.key.mean[:, :8], layer.key.mean[:, 8:]).amax(0) for layer in analysis.capture.layers]
    numpy.testing.assert_allclose(keys, torch.stack(expected))


# --- real models -----------------------------------------------------------------------------------------------------


def test_a_real_model_of_two_tables_has_a_page(figures, tmp_path):
    model = small("gemma4")
    texts = {"a": "One of the texts. " * 20, "b": "And another one. " * 20}
    analysis = analyze(model, TOKENIZER, texts, window=40, tokens=160, p_values=(), heads=[(0, 1), (1, 3)])
    write(tmp_path / "page.html", analysis_report.page(analysis))
    assert not NO_NUMBER.search("".join(Page((tmp_path / "page.html").read_text(encoding="utf-8")).text))
    (norms,) = (figure for figure in figures if figure.get_suptitle() == "Mean norm of each pair, by head")
    assert sorted(axes.images[0].get_array().shape[1] for axes in norms.axes if axes.images) == [8] * 3 + [16] * 3
    labels = {label for figure in figures for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())}
    assert all("[" in label for label in labels if "position" in label or "wavelength" in label or "distance" in label)
    assert "position [tokens]" in labels
