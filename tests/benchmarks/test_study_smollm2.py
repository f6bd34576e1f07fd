"""The study of SmolLM2 at its quick size, on a bundled checkpoint: cells, what they need, and their numbers."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation.documents import spread_windows
from rope_patch.evaluation.text import builtin_text
from rope_patch.fitting.rows import Objective, Rows
from rope_patch.fitting.texts import fit_texts

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")]
MODEL = rope_patch.data_path("assets") / "llama"


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("smollm2_cells")


@pytest.fixture
def texts(tmp_path: Path, cells: Any) -> tuple[Path, Path]:
    """A folder of novels and a file of WikiText, of the built-in text."""
    novels, wikitext = tmp_path / "novels", tmp_path / "wikitext.txt"
    novels.mkdir()
    whole = builtin_text("train").text
    for number, name in enumerate([*cells.HELD_OUT, "another.txt"]):
        (novels / name).write_text(whole[number * 50_000 : (number + 1) * 50_000], encoding="utf-8")
    other = builtin_text("heldout").text
    articles = [other[:30_000], "\n = another article = \n", other[30_000:45_500]]
    wikitext.write_text(f"{''.join(articles)}\n = an article = \n{other[45_500:90_000]}", encoding="utf-8")
    return novels, wikitext


def study(tmp_path: Path, texts: tuple[Path, Path], *options: str) -> dict[str, Any]:
    """Run the study in a fork, and return its report."""
    output, log = tmp_path / "study.json", tmp_path / "log.txt"
    command = [str(FOLDER / "study_smollm2.py"), str(MODEL), "--novels", str(texts[0]), "--wikitext", str(texts[1])]
    command += ["--root", str(tmp_path / "cells"), "--quick", "-o", str(output), *options]

    run_script(command, log)
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def test_slopes_are_differences_of_the_loss(cells: Any, texts: tuple[Path, Path], tmp_path: Path) -> None:
    report = study(tmp_path, texts, "--cells", "slopes-*")
    slopes = report["slopes-yarn-zero-128"]["text"]
    assert slopes["rows"] == cells.QUICK.fit_steps == 2
    where = cells.Study(MODEL, *texts, tmp_path / "cells", cells.QUICK)
    tokenizer, (part,) = AutoTokenizer.from_pretrained(MODEL), fit_texts(where.fit_text("novels")[0], 0.0).parts
    rows = Rows(tokenizer, [part], Objective(positions="pose", row_length=128, mix=0.0), 256, 512, 256, 0)
    model = rope_patch.load(MODEL, dtype=torch.float64)
    table = rope_patch.apply(model, "yarn:factor=2", target_length=512).after[None]

    def loss(pair: int | None, by: float) -> float:
        values = table.inv_freq.double()
        if pair is not None:
            values[pair] *= math.exp(by)
        scaling = table.attention_scaling * (1 if pair is not None else math.exp(by))
        rope_patch.apply(model, rope_patch.Table(tuple(values.tolist()), scaling), replace=True, target_length=512)
        total = 0.0
        for step in range(2):
            ((ids, _, _, positions),) = rows(step, 0)
            with torch.no_grad():
                out = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids))
            total += float(torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])) / 2
        return total

    assert loss(0, 0.0) == pytest.approx(slopes["loss"], abs=0.01)  # measured in bfloat16
    for pair, slope in [(7, slopes["by pair"][7]), (8, slopes["by pair"][8]), (None, slopes["by scaling"])]:
        assert slope == pytest.approx((loss(pair, 0.005) - loss(pair, -0.005)) / 0.01, rel=0.25)  # of bfloat16


def test_what_the_core_holds(cells: Any) -> None:
    sizes = cells.Sizes()
    core = cells.core(sizes)
    at_16k = [cell for cell in core if cell.kind == "text" and cell.state == "zero"]
    assert len(at_16k) >= 9 and {cell.length for cell in at_16k} == {16384} and sizes.windows == 6
    asked = {(cell.table, cell.length) for cell in core if cell.kind == "passkey" and cell.state == "zero"}
    assert len(sizes.depths) * sizes.samples == 8 and len({length for _, length in asked}) == 4
    assert len([cell for cell in core if cell.kind == "train"]) == 3 and sizes.rows >= 200
    assert len({cell.name for cell in core}) == len(core)
    assert not set(cells.more(sizes)) & {*core, *cells.later(sizes)} and not set(core) & set(cells.later(sizes))
    hours = sum(cells.operations(cell, sizes) for cell in core) / cells.speed_of([]) / 3600
    assert hours < 10


def test_cells_come_after_what_they_need(cells: Any, tmp_path: Path) -> None:
    where = cells.Study(MODEL, tmp_path, tmp_path, tmp_path, cells.QUICK)
    cell = cells.Cell("passkey", "yarn", "pose", 512)
    assert where.needs(cell) == cells.Cell("train", "yarn", "pose", 128)
    assert where.needs(cells.Cell("text", "yarn", "full", 1024, 4, 2)) == cells.Cell(
        "train", "yarn", "full", 1024, 4, 2
    )
    assert where.needs(cells.Cell("text", "fitted", "zero", 512)) == cells.Cell("fit", "fitted", "zero", 512)
    assert where.needs(cells.Cell("fit", "fitted", "zero", 512)) is None
    assert where.adapter(cell) == where.adapter(where.needs(cell))


def test_a_fit_that_finds_nothing_better_has_no_cells_of_its_own(
    cells: Any, tmp_path: Path, texts: tuple[Path, Path]
) -> None:
    where = cells.Study(MODEL, tmp_path, tmp_path, tmp_path, cells.QUICK)
    fitted = cells.Cell("text", "fitted", "zero", 512)
    start, other = {"method": "yarn:factor=2"}, {"method": "scaled:base=1e4"}
    assert where.repeats(fitted, {"fit-fitted-zero-512": start})
    assert not where.repeats(fitted, {"fit-fitted-zero-512": other})
    assert not where.repeats(fitted, {"fit-fitted-wikitext-zero-512": start})
    assert not where.repeats(cells.Cell("text", "yarn", "zero", 512), {"fit-fitted-zero-512": start})
    assert not where.repeats(cells.Cell("fit", "fitted", "zero", 512), {"fit-fitted-zero-512": start})
    trained = cells.Cell("text", "yarn", "pose", 512)
    assert not where.repeats(trained, {where.needs(trained).name: {"patch": "yarn:factor=2"}})
    report = study(tmp_path, texts, "--cells", "short-default-zero*")
    assert "passkey-fitted-zero-512" in report["unfinished"]
    (tmp_path / "study.json").write_text(json.dumps({**report, "fit-fitted-zero-512": start}))
    report = study(tmp_path, texts, "--cells", "passkey-fitted-zero-512")
    assert report["passkey"] == [] and "passkey-fitted-zero-512" not in report["unfinished"]
    assert "passkey-fitted-wikitext-zero-512" in report["unfinished"]


def test_no_text_is_trained_on_and_measured(cells: Any, texts: tuple[Path, Path], tmp_path: Path) -> None:
    where = cells.Study(MODEL, *texts, tmp_path / "root", cells.QUICK)
    for name in [*cells.HELD_OUT, "another.txt"]:
        (texts[0] / name).write_text(f"{name} is this text.", encoding="utf-8")
    for held_out in (False, True):
        text = where.text("novels", held_out=held_out)
        assert [name for name in [*cells.HELD_OUT, "another.txt"] if name in text] == (
            list(cells.HELD_OUT) if held_out else ["another.txt"]
        )
    trained, held_out = (where.text("wikitext", held_out=side) for side in (False, True))
    assert trained + held_out == texts[1].read_text(encoding="utf-8") and held_out.startswith("\n = an article")
    folder = where.training_text("novels")
    assert "".join(path.read_text() for path in sorted(folder.iterdir())) == where.text("novels", held_out=False)
    (texts[0] / cells.HELD_OUT[0]).unlink()
    with pytest.raises(FileNotFoundError, match=cells.HELD_OUT[0]):
        where.text("novels", held_out=True)


def test_a_table_is_fitted_to_one_part_of_wikitext_and_chosen_on_another(
    cells: Any, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    where = cells.Study(MODEL, *texts, tmp_path, cells.QUICK)
    data, decides = where.fit_text("wikitext")
    assert data + decides.read_text(encoding="utf-8") == where.text("wikitext", held_out=False)
    assert decides.read_text(encoding="utf-8").startswith("\n = another article")
    assert where.fit_text("novels") == (where.text("novels", held_out=False), None)
    texts[1].write_text("no article. " * 500 + "\n = one = \n" + "no other. " * 500, encoding="utf-8")
    with pytest.raises(ValueError, match="no article begins in its second quarter"):
        where.fit_text("wikitext")


def test_cells_are_measured_once_and_equal_transformers(tmp_path: Path, texts: tuple[Path, Path], cells: Any) -> None:
    names = ["text-default-zero*", "text-yarn-zero*", "passkey-yarn-zero*"]
    report = study(tmp_path, texts, "--cells", *names, "--figure", str(tmp_path / "figure.png"))
    plain, yarn = report["text"]
    where = cells.Study(MODEL, *texts, tmp_path / "cells", cells.QUICK)
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL).bfloat16()
    windows, _ = spread_windows(tokenizer, where.text("novels", held_out=True), 512, 2)
    with torch.no_grad():
        logits = model(windows[1].ids[None]).logits[0, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits, windows[1].ids[1:], reduction="none")
    assert plain["nll"]["256-384"][1] == pytest.approx(float(losses[255:383].mean()), abs=0.02)  # bfloat16
    change = yarn["nll_minus_unpatched"]["384-512"]
    assert "nll_minus_unpatched" not in plain
    assert change["estimate"] == pytest.approx(
        math.log(yarn["perplexity"]["384-512"] / plain["perplexity"]["384-512"]), abs=1e-9
    )
    assert change["interval"][0] <= change["estimate"] <= change["interval"][1]
    assert [(row["length"], row["prompts"]) for row in report["passkey"]] == [(128, 2), (512, 2)]
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert "train-yarn-pose-128" in report["unfinished"] and "text-yarn-zero-512" not in report["unfinished"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    again = study(tmp_path, texts, "--cells", *names)
    assert again["text"] == report["text"] and again["passkey"] == report["passkey"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")} == before
    joined = tmp_path / "elsewhere"
    joined.mkdir()
    shutil.copy(tmp_path / "study.json", joined)
    elsewhere = study(joined, texts, "--cells", "text-yarn-zero*")  # which has none of the finished cells
    assert elsewhere["text"] == report["text"] and elsewhere["passkey"] == report["passkey"]
    assert elsewhere["unfinished"] == report["unfinished"] and elsewhere["minutes"] == report["minutes"]
    cell = tmp_path / "cells" / "text-yarn-zero-512.json"
    cell.write_text(cell.read_text().replace("yarn:factor=2", "yarn:factor=3"))
    with pytest.raises(AssertionError, match="with another table"):
        study(tmp_path, texts, "--report")


def test_results_of_other_texts_are_refused(tmp_path: Path, texts: tuple[Path, Path], cells: Any) -> None:
    root = tmp_path / "cells"
    root.mkdir()
    (root / "heads---zero-128.json").write_text('{"about": {"weights": "others"}}')
    with pytest.raises(AssertionError, match="other weights or texts"):
        study(tmp_path, texts, "--report")


def test_a_report_may_be_of_adapters_trained_on_another_text(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    report = study(tmp_path, texts, "--cells", "short-default-zero*")
    trained = {**report["text"][0], "table": "yarn", "state": "pose"}
    (tmp_path / "study.json").write_text(json.dumps({**report, "text": [*report["text"], trained]}))
    (texts[0] / "another.txt").write_text("Another text to train on.", encoding="utf-8")
    more = study(tmp_path, texts, "--cells", "short-yarn-zero*")
    assert [(row["table"], row["state"]) for row in more["text"]] == [
        ("yarn", "pose"), ("default", "zero"), ("yarn", "zero")
    ]  # fmt: skip
    assert more["sha256"] == report["sha256"]
    with pytest.raises(AssertionError, match=r"\(training\): .* or measure these again: short-yarn-pose-128"):
        study(tmp_path, texts, "--cells", "train-yarn*")
    (texts[0] / "moby_dick.txt").write_text("Another text to measure.", encoding="utf-8")
    with pytest.raises(AssertionError, match="measured on other weights or texts"):
        study(tmp_path, texts, "--report")


def test_a_report_takes_the_text_that_all_its_adapters_were_trained_on_again(
    tmp_path: Path, texts: tuple[Path, Path], cells: Any
) -> None:
    earlier = importlib.import_module("smollm2_earlier")
    where = cells.Study(MODEL, *texts, tmp_path / "cells", cells.QUICK)
    common = {"table": "yarn", "state": "pose", "factor": 2.0, "seed": 0}
    report = {
        "sha256": {"weights": "same", "training": "before"},
        "text": [
            {**common, "length": 128, "text": "wikitext"},
            {**common, "state": "zero", "length": 512, "text": "novels"},
        ],
        "passkey": [{**common, "length": 512, "by": "transformers"}],
        "caches": [{**common, "length": 128, "scheme": scheme} for scheme in ("fp8", "nf4")],
        "train-yarn-pose-128": {},
    }
    (tmp_path / "study.json").write_text(json.dumps(report))
    lengths = {"short": 128, "passkey": 512, "kv": 128, "train": 128}
    again = [cells.Cell(kind, "yarn", "pose", length) for kind, length in lengths.items()]
    assert earlier.learned_cells(report, where) == {cell.name for cell in again}
    about = {"weights": "same", "training": "now"}
    assert earlier.earlier_report(tmp_path / "study.json", about, where, again)["sha256"] == about
    for left in again:
        rest = [cell for cell in again if cell != left]
        with pytest.raises(ValueError, match=f"measure these again: {left.name}$"):
            earlier.earlier_report(tmp_path / "study.json", about, where, rest)
    with pytest.raises(ValueError, match=r"\(weights\): give another file$"):
        earlier.earlier_report(tmp_path / "study.json", {**about, "weights": "others"}, where, again)


@pytest.mark.full
def test_every_cell(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    names = [f"{kind}-*" for kind in ("heads", "text", "short", "passkey", "train", "fit", "slopes", "kv")]
    report = study(tmp_path, texts, "--cells", *names)
    assert all(name.startswith("engine") for name in report["unfinished"])
    trained = [row for row in report["text"] if row["state"] == "pose" and row["table"] == "yarn"]
    assert trained and all("nll_minus_default_trained_alike" in row for row in trained)
    assert {row["scheme"] for row in report["caches"]} == {"fp8", "int4-token", "kivi-2", "nf4"}
    heads = report["heads---zero-128"]
    for outliers in heads["outliers"].values():
        assert sum(outliers["by pair"]) == outliers["outliers"] >= outliers["below the frequency bound"]
    assert sum(heads["usage"]["query"]) == pytest.approx(1)


def test_the_page_holds_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    tables = importlib.import_module("smollm2_page")
    page = (FOLDER.parent / "docs" / "smollm2.md").read_text(encoding="utf-8")
    assert tables.page_with_tables(page) == page
    with pytest.raises(ValueError, match="no table is named 'textt'"):
        tables.page_with_tables("<!-- table textt -->\n<!-- end -->")
