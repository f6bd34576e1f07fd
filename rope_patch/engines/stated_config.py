"""A checkpoint's config as programs find it: its keys, its tables, and what each layer attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from rope_patch.patching.older_keys import text_part
from rope_patch.tables import RotaryTable

FULL = "full_attention"
SLIDING = "sliding_attention"
ALL_SLIDE = ("mistral", "phi3")
"""Families whose configs have no layer types: a window is that of every layer."""


@dataclass(frozen=True)
class LayerReach:
    """The attention of one layer.

    Attributes:
        kind: the layer type whose table it uses; None if all layers share a table.
        window: the number of tokens to which it attends; None if it attends to the whole context.
    """

    kind: str | None
    window: int | None

    def __str__(self) -> str:
        return f"{self.kind or 'attention'} over {self.window or 'all'} tokens"


@dataclass(frozen=True)
class StatedConfig:
    """A checkpoint's config, as it is written and as transformers 5 completes it.

    Attributes:
        model_type: the model type of the text decoder.
        outer_type: the model type of the whole checkpoint, which is another for a multimodal one.
        raw: the text part of config.json.
        complete: the text config as transformers 5 writes it.
        tables: the tables that transformers 5 computes, by layer type.
        defaults: the config of the family without settings, and with as many layers; empty if its class needs some.
        unread: the keys of ``raw`` about attention that the class of transformers 5 stores and does not know. A value
            that switches something off, or that is 1, is no setting.
    """

    model_type: str
    outer_type: str
    raw: Mapping[str, Any]
    complete: Mapping[str, Any]
    tables: Mapping[str | None, RotaryTable]
    defaults: Mapping[str, Any]
    unread: Sequence[str] = ()

    @classmethod
    def of(cls, text: PreTrainedConfig, whole: dict[str, Any], tables: Sequence[RotaryTable]) -> StatedConfig:
        """Return the config of a checkpoint.

        Args:
            text: the config of the text decoder in transformers 5.
            whole: the contents of config.json; empty for a GGUF file.
            tables: the tables that transformers 5 computes.
        """
        return cls(
            model_type=str(text.model_type),
            outer_type=str(whole.get("model_type", text.model_type)),
            raw=text_part(whole),
            complete={
                **text.to_dict(),
                **{name: getattr(text, name) for name in text.attribute_map},
                "num_hidden_layers": text.num_hidden_layers,  # of some classes no key of their own
            },
            tables={table.layer_type: table for table in tables},
            defaults=_defaults(text),
            unread=[
                name
                for name, value in text_part(whole).items()
                if ("attention" in name or "attn" in name) and value not in (None, False, 1)
                if name in vars(text).keys() - type(text).__dataclass_fields__
            ],
        )

    @property
    def context(self) -> int:
        """The context that the config states [tokens]."""
        return next(iter(self.tables.values())).max_position_embeddings

    def parameters(self, kind: str | None) -> Mapping[str, Any]:
        """Return the ``rope_parameters`` of a layer type, as transformers 5 completes them."""
        every: Mapping[str, Any] = self.complete["rope_parameters"]
        return every if kind is None else every[kind]

    def usual_parameters(self, layer_type: str | None) -> Mapping[str, Any]:
        """Return the ``rope_parameters`` of a layer type in a config that states none."""
        parameters: Mapping[str | None, Any] = self.defaults.get("rope_parameters") or {}
        return dict(parameters.get(layer_type, parameters) or {})  # a type may have no table

    @property
    def usual_base(self) -> float | None:
        """The base of a config that states none, of full attention where there are several."""
        return self.usual_parameters(FULL).get("rope_theta")

    @property
    def usual_layer_types(self) -> Sequence[str]:
        """The types of the layers in a config that states none."""
        return self.defaults.get("layer_types") or ()

    @property
    def layers(self) -> tuple[LayerReach, ...]:
        """The layers as transformers runs them."""
        kinds = self.complete.get("layer_types")
        if kinds is None:
            kinds = [SLIDING if self.model_type in ALL_SLIDE else FULL] * int(self.complete["num_hidden_layers"])
        return tuple(self.layer(kind) for kind in kinds)

    def layer(self, layer_type: str) -> LayerReach:
        """Return what a layer of a type attends to, and whose table it uses."""
        window = self.complete.get("sliding_window")
        # A window as long as the context limits nothing.
        if layer_type == FULL or not window or window >= self.context:
            window = None
        kind = layer_type if layer_type in self.tables else None
        return LayerReach(kind, window)


def _defaults(text: Any) -> Mapping[str, Any]:
    """Return the config of a family without settings; empty if its class needs some."""
    try:
        defaults: Mapping[str, Any] = type(text)(num_hidden_layers=text.num_hidden_layers).to_dict()
    except Exception:  # its validators may raise anything
        return {}
    return defaults
