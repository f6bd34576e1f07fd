"""Repositories of the hub, of which a local cache holds some files and the hub the others."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub.utils import filter_repo_objects


def cached_repository(monkeypatch, root: Path, name: str, files: Path, cached=("*",)) -> Path:
    """Put files of a repository into a cache of huggingface_hub, which is used from now on; return their folder."""
    snapshot = root / f"models--{name.replace('/', '--')}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    fill(snapshot, files, cached)
    return snapshot


def fill(snapshot: Path, files: Path, patterns) -> None:
    """Copy the files whose names match patterns, as huggingface_hub reads them."""
    names = [str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()]
    for name in filter_repo_objects(names, allow_patterns=list(patterns)):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files / name, snapshot / name)


def reachable(monkeypatch, snapshot: Path, files: Path) -> None:
    """Let the hub answer: what is asked for by patterns comes into the cache."""

    def download(repository, allow_patterns):
        fill(snapshot, files, allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
