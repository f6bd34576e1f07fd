"""``rope-patch verify``."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import print_json
from rope_patch.options.checkpoints import VerifyOptions


def verify(words: Sequence[str]) -> None:
    """Run ``rope-patch verify`` with the words behind it."""
    options = parse(VerifyOptions, words)
    from rope_patch import checkpoints

    verified = checkpoints.verify(options.model)
    if options.as_json:
        weights = {} if verified.weights is None else {"weights": verified.weights}
        print_json({"verified": True, **weights, "record": verified.record.to_dict()})
        return
    print(verified)
