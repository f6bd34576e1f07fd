"""The cache formats that ``rope-patch kv-check --list`` prints."""

from __future__ import annotations

from rope_patch.cli.printing import new_table, show

HEAD_DIM = 128
"""The number of features of a head for which the bits of presets are listed."""


def print_presets() -> None:
    """Print the cache formats with source, bits and what they were compared with, and the number formats of texts."""
    from rich.markup import escape

    from rope_patch.kv_cache.formats import FORMATS
    from rope_patch.kv_cache.schemes import PRESETS, SWITCHES, Scheme, effective_bits

    table = new_table("format", "bits", "source, and as a text", "compared with")
    table.columns[2].min_width = 70  # so that no text is broken into two lines
    for name, preset in PRESETS.items():
        scheme = Scheme.parse(name)
        bits = ", ".join(f"{effective_bits(side, HEAD_DIM):.2f}" for side in (scheme.key, scheme.value))
        table.add_row(name, bits, escape(f"{preset.source}\n{preset.text}"), escape(preset.compared))
    show(table)
    table = new_table(
        *("number format", "bits of an element", "what it is"),
        caption="Parts may be added to a format: kivi-2;sinks=4. A text is "
        "k=SIDE;v=SIDE;residual=N;flush=N;sinks=N;skip=0+27, a side FORMAT.AXIS.SWITCH…: axes token, tokenN, channelN; "
        f"switches {', '.join(SWITCHES)}. Bits are those of keys and values, heads of {HEAD_DIM} "
        "features, without sinks and residual window.",
        caption_justify="left",
    )
    for name, form in FORMATS.items():
        table.add_row(name, f"{form.bits:g}", escape((form.__doc__ or "").partition("\n")[0]))
    show(table)
