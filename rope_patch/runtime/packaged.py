"""Where the files that ship with rope_patch lie, in a wheel and in a checkout; what a checkpoint is called."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA_FOLDERS = ("assets", "eval_tasks", "recipes")


def data_path(name: str) -> Path:
    """Return the folder of files that ship with the package under ``name``.

    A wheel carries ``eval_tasks`` and ``recipes`` inside the package, under ``_data``; in a checkout (and so
    in an editable install) they lie beside it. ``assets`` is inside the package in both.

    Args:
        name: the name of the folder: ``"assets"``, ``"eval_tasks"`` or ``"recipes"``.

    Returns:
        The absolute path of an existing folder. Treat it as read-only.

    Raises:
        ValueError: ``name`` is none of the known names.
        FileNotFoundError: this installation does not hold the folder.

    Example:
        >>> data_path("recipes").name
        'recipes'
        >>> data_path("recipe")
        Traceback (most recent call last):
        ...
        ValueError: unknown data folder 'recipe'. Known: assets, eval_tasks, recipes
    """
    if name not in _DATA_FOLDERS:
        raise ValueError(f"unknown data folder {name!r}. Known: {', '.join(_DATA_FOLDERS)}")
    if name == "assets":
        candidates = [_PACKAGE / name]
    else:
        candidates = [_PACKAGE / "_data" / name]
        # Beside an installed package lies site-packages, where a folder called "recipes" would be someone else's.
        if (_PACKAGE.parent / "pyproject.toml").is_file():
            candidates.append(_PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"this installation of rope_patch holds no {name!r} folder: neither {_PACKAGE} nor a checkout around it has "
        "one. Reinstall the wheel, or run pip install -e . in a complete checkout"
    )


def name_of(source: str) -> str:
    """Return the name of a checkpoint: that of its folder, or of its repository."""
    path = Path(source)
    return path.resolve().name if path.exists() else path.name
