"""Errors of libraries become a ValueError that names the file, and those of this package stay as they are."""

import pytest

from rope_patch.runtime.errors import as_value_error


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        ("rope_patch", True),
        ("rope_patch.runtime.gguf_file", True),
        ("rope_patch_extras", False),
        ("rope_patches.a", False),
    ],
)
def test_only_errors_that_this_package_raised_pass_as_they_are(module, ours):
    with pytest.raises(ValueError, match="bad value") as raised, as_value_error("FILE: cannot be read"):
        exec("raise ValueError('bad value')", {"__name__": module})
    assert str(raised.value).startswith("FILE: ") != ours
