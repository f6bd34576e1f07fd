"""The plug-in with which axolotl trains under a rotary patch; its hooks are those of axolotl 0.18.0.

    plugins: [rope_patch.integrations.axolotl.RopePatchPlugin]
    rope_patch: {method: yarn, target_length: 131072}

Below ``rope_patch`` are the options of section ``patch`` of a recipe. Every checkpoint and adapter gets its record.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from rope_patch.checkpoints.callback import RopePatchCallback
from rope_patch.methods import as_method
from rope_patch.options.finetune import PatchOptions
from rope_patch.options.yaml_and_json import options_from_dict
from rope_patch.patching.install import apply


class RopePatchArgs(BaseModel):
    """The key that axolotl accepts in its YAML."""

    rope_patch: dict[str, Any]

    @field_validator("rope_patch")
    @classmethod
    def check(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse options that are not known, before anything is loaded."""
        options = options_from_dict(PatchOptions, value)
        if options.method is None:
            raise ValueError("rope_patch needs a method, such as yarn")
        as_method(options.method)
        return value


class RopePatchPlugin(BasePlugin):  # type: ignore[misc]  # axolotl has no types
    """Patches the model before adapters are added, and saves the record of the patch with everything."""

    def get_input_args(self) -> str:
        """Return the name of the class that describes the key ``rope_patch``."""
        return f"{__name__}.{RopePatchArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patch the model; without ``target_length`` for the length of axolotl's rows.

        Raises:
            ValueError: the patch is for a shorter context than the rows; axolotl would state theirs in the config.
            PatchError: the patch does not fit the model.
        """
        options = options_from_dict(PatchOptions, cfg.rope_patch)
        patching = options.patching.arguments()
        target = patching["target_length"] or cfg.sequence_len
        if target < cfg.sequence_len:
            raise ValueError(f"rope_patch.target_length={target} is less than sequence_len={cfg.sequence_len}")
        apply(model, options.method or "default", **patching | {"target_length": target}, replace=options.replace)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that writes the record beside each checkpoint, and checks that the patch is there."""
        return [RopePatchCallback()]
