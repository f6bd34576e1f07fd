"""What mkdocs makes besides the pages of this folder: the README, the Python API, and what pages link to.

make docs        # into build/site
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import rope_patch

ROOT = Path(__file__).resolve().parents[1]
FIRST, LAST = ("patching", "checkpoints", "extending", "evaluation"), ("methods", "tables", "runtime")
"""Parts of the page of the Python API that begin it and end it."""
PAGES = {"README.md": "start.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository that become pages."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:]+)((?:#[^)]*)?)\)")


def on_config(config: Any) -> Any:
    """Add the pages of the methods to the navigation."""
    (methods,) = [section["Methods"] for section in config["nav"] if "Methods" in section]
    methods += [f"methods/{page.name}" for page in sorted((ROOT / "docs" / "methods").glob("*.md"))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, and the results that pages link to."""
    made = {"api.md": api(), "ledger.md": runpy.run_path(str(ROOT / "docs" / "ledger.py"))["page"]()}
    for page, name in PAGES.items():
        made[name] = (ROOT / page).read_text(encoding="utf-8").replace("](docs/", "](")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, f"benchmarks/results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to results into the site; what is in the repository alone becomes its path."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        text, written, anchor = match.groups()
        if files.get_file_from_path(posixpath.normpath(posixpath.join(folder, written))) is not None:
            return match[0]
        path = re.sub(r"^(\.\./)+", "", written)
        path = PAGES.get(path, path)
        if files.get_file_from_path(path) is not None:
            return f"[{text}]({posixpath.relpath(path, folder)}{anchor})"
        return f"{text} (`{path}`)" if (ROOT / path).exists() else match[0]

    return LINK.sub(target, markdown)


def api() -> str:
    """Return the page of all public names, by the part of the package that they come from."""
    lines = [
        "# Python API",
        "",
        "All names are imported from `rope_patch`; importing it does no work until one is used.",
    ]
    parts: dict[str, list[str]] = {}
    for name in rope_patch.__all__:
        if name != "__version__":
            module = rope_patch._MODULE_OF[name]
            parts.setdefault(module.split(".")[1], []).append(f"{module}.{name}")
    for part in [*FIRST, *(part for part in parts if part not in (*FIRST, *LAST)), *LAST]:
        lines += ["", f"## {part.replace('_', ' ')}"]
        for name in sorted(parts[part], key=lambda name: (name.rpartition(".")[2][0].isupper(), name)):
            lines += ["", f"::: {name}"]
            if part == "methods":  # their parameters; what they compute is the same for all
                lines += ["    options:", "      members: false"]
    return "\n".join(lines) + "\n"
