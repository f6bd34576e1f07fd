"""``--shard`` and ``--merge`` of ``rope-patch compare``."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.options import RESULT_CACHE, items, value_of


def folders(text: str) -> list[Path]:
    """Return the folders of a list, in which ``*`` stands for any letters.

    Raises:
        ValueError: nothing is there.
    """
    found = []
    for item in items(text):
        matching = [Path(name) for name in sorted(glob.glob(item)) if Path(name).is_dir()]
        if not matching:
            raise ValueError(f"no folder {item!r}")
        found += matching
    if not found:
        raise ValueError("give the folders of all shards")
    return found


ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="NUMBER/COUNT",
        help="Measure only a part of everything, such as 3/16, into an output folder of its own. Shards may run at any "
        "time, on any machine; --merge joins them.",
        show_default=False,
    ),
]
Merge = Annotated[
    Sequence[Path],
    typer.Option(
        "--merge",
        parser=value_of("--merge", folders),
        metavar="FOLDERS",
        help='Join the folders of all shards, for example "out/shard-*", with the options that they were measured '
        "with. No weights are loaded.",
        show_default=False,
    ),
]


def check_options(output: Path, shard: str | None, merge: Sequence[Path], budget: int | None, given: str | None) -> Any:
    """Return the shard that is asked for; None without one.

    Args:
        output: value of ``--output``.
        shard: value of ``--shard``.
        merge: value of ``--merge``.
        budget: value of ``--budget``.
        given: ``--json`` where it was given.

    Raises:
        ValueError: options that do not go together, or shards.
    """
    from rope_patch.evaluation.shards import parse_shard, read_shards

    if shard is not None and merge:
        raise ValueError("--shard measures a part, and --merge joins all: give one of them")
    if (shard is not None or merge) and budget is not None:
        raise ValueError("--budget plans with the pace of one machine: leave it out, and give --windows and --samples")
    if shard is not None and given:
        raise ValueError("--json prints a comparison, and a shard is none: leave it out")
    if any(part.resolve() == output.resolve() for part in merge):
        raise ValueError(f"{output} is the folder of a shard: give another --output for what is joined")
    if merge:
        read_shards(merge)  # what does not belong together is refused before anything is loaded
    return None if shard is None else parse_shard(shard)


def outline_of(model: str, adapter: str | None) -> Any | None:
    """Return a model without weights; None of what needs them to be described, such as an adapter."""
    from rope_patch.checkpoints.adapters import is_adapter
    from rope_patch.checkpoints.offline import skeleton

    if adapter is not None or is_adapter(model):
        return None
    try:
        return skeleton(model).eval()
    except ValueError:
        return None


def measure(
    model: Any,
    outline: Any,
    suite: Any,
    methods: Sequence[Any],
    shard: Any,
    output: Path,
    patch: Mapping[str, Any],
    notes: Mapping[str, str],
    on_progress: Callable[[str, int], None],
) -> None:
    """Measure a shard, and print what to do with it."""
    from rope_patch.evaluation.shards import describe, measure_shard

    measure_shard(
        model,
        suite,
        methods,
        shard,
        output,
        output / RESULT_CACHE,
        about=describe(model, outline, methods, suite, patch),
        notes=notes,
        on_progress=on_progress,
    )


def joined(
    suite: Any, methods: Sequence[Any], parts: Sequence[Path], output: Path, patch: Mapping[str, Any], chooser: Any
) -> list[dict[str, Any]]:
    """Write the results of all shards into the output folder, and return what they say of themselves.

    Args:
        suite: what was measured.
        methods: with their factors.
        parts: folders of the shards.
        output: folder of the comparison.
        patch: ``layer_types`` and ``freeze_at``.
        chooser: another model that chose the tokens of LongPPL; None where the one measured did.
    """
    from rope_patch.evaluation.shards import check_asked, join, read_shards
    from rope_patch.evaluation.suite import evaluator_name

    records = read_shards(parts)
    about = {"methods": [str(method) for method in methods], "patch": dict(patch), "spec": suite.spec.to_dict()}
    about["evaluator"] = None if chooser is None else evaluator_name(chooser)
    check_asked(records, about | {"text": suite.text_sha256, "haystack": suite.prompts.haystack.sha256})
    join(parts, output / RESULT_CACHE)
    return records
