"""The check of a saved folder in a process without this package."""

import pytest
from support.tiny import tiny_model

from rope_patch.checkpoints import plain_reload


def test_what_plain_transformers_prints_is_read_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    program = r"import sys; sys.stderr.buffer.write('Gewichte für █ fehlen'.encode() + b' \xff'); sys.exit(1)"
    monkeypatch.setattr(plain_reload, "PROGRAM", program)
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="Gewichte für █ fehlen \ufffd"):
        plain_reload.plain_logits(tmp_path, 96)
