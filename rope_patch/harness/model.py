"""lm-eval's Hugging Face model with a patch on it: how it is loaded, patched and named in results."""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForImageTextToText

from rope_patch.checkpoints.adapters import (
    adapter_base,
    adapter_config,
    check_adapter_tables,
    check_adapter_tensors,
    is_adapter,
    read_record,
)
from rope_patch.checkpoints.source_files import auto_class
from rope_patch.evaluation.finished_work import finished_work
from rope_patch.harness.answering_model import AnsweringLM
from rope_patch.kv_cache.blocks import scheme_identity
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.methods import METHODS, MethodLike, as_method
from rope_patch.modeling.reader import Reader
from rope_patch.options.fields import COUNT
from rope_patch.patching.install import apply, reapply
from rope_patch.patching.locate import locate
from rope_patch.patching.record import key_of
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.runtime import result_cache

MODEL_NAME = "rope_patch"
"""The name of this model type, for ``--model``."""

METHOD_PARAMETERS = {f.name for method in METHODS.values() for f in fields(method)}
"""Every parameter of every method; none of them is an argument of lm-eval's."""

IDENTITY_ENTRY = "rope_patch: whose answers these are"
"""Entry of lm-eval's file of answers that names the model and the patch that gave them."""

DECODED_TOKENS = 1000
"""Number of tokens whose text tells how a tokenizer decodes and encodes."""

PATCHING_ARGUMENTS = ("target_length", "layer_types", "freeze_at", "replace")
"""Arguments of :func:`rope_patch.apply` among those of lm-eval."""


def _base_and_adapter(adapter: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the base of an adapter that was given as the model, which ``hf`` would load onto its base's own tables."""
    base = adapter_base(adapter)
    if base == adapter:
        raise ValueError(f"{adapter} holds a model and an adapter: give their folders apart, pretrained= and peft=")
    if (Path(adapter) / "tokenizer_config.json").is_file():
        arguments = {"tokenizer": adapter} | arguments
    return base, arguments | {"peft": adapter}


class RopePatchLM(AnsweringLM):
    """A causal language model under a patch, for lm-eval.

    Log-likelihoods are those of lm-eval's ``hf``, computed in float32 a slice at a time. What does not fit raises;
    ``hf`` would cut it from the left, and the needle with it.

    Args:
        pretrained: a folder, a hub id, or a model in memory, which is patched in place. An adapter's folder stands for
            its base with ``peft=``.
        method: the method: a name with its parameters as further arguments (``method=p_rope,p=0.75``), a method string
            (``method=abf:rope_theta=500000+p_rope:p=0.5``), or in JSON a list or :meth:`~rope_patch.Method.to_dict`. By
            default the model stays as its folder, or its adapter's record, says.
        target_length: the context that the config states after patching; texts may be as long as that [tokens].
        layer_types: the layer types whose tables are patched, joined by ``/``, on models with one table per layer type.
        freeze_at: the length at which a dynamic table is frozen [tokens].
        replace: whether to replace the patch that a folder carries.
        chunk: the number of tokens per forward pass; whole prompts by default [tokens].
        kv_cache: the cache formats by which keys and values are read as if they were quantized, exactly as decoding
            would read them: ``kivi-2``, or the text of :mod:`rope_patch.kv_cache.schemes`. Prompts of
            ``generate_until`` are then read one at a time.
        **kwargs: further arguments of lm-eval's ``hf``, the method's parameters, and what ``from_pretrained`` takes.

    Raises:
        ValueError: a bad method, an encoder-decoder, or an option that would cut prompts.
        TypeError: an unknown argument.
        PatchError: an adapter of ``peft=`` that was trained under other tables than the model is patched with, or that
            carries no record and meets a patched model.
    """

    def __init__(
        self,
        pretrained: Any,
        method: MethodLike | None = None,
        *,
        chunk: int | None = None,
        kv_cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        scheme = Scheme() if kv_cache is None else Scheme.parse(str(kv_cache))
        params = {key: kwargs.pop(key) for key in list(kwargs) if key in METHOD_PARAMETERS}
        options = {key: kwargs.pop(key) for key in PATCHING_ARGUMENTS if key in kwargs}
        given = [*params, *(key for key, value in options.items() if value is not None and key != "replace")]
        if method is None and given:
            raise ValueError(f"{given[0]} says how to patch: give method= too (method=default leaves the table)")
        requested = None if method is None else as_method(method, **params)
        if chunk is not None:
            COUNT.checked("chunk", chunk)
        if kwargs.get("truncation"):
            raise ValueError("truncation=True would cut prompts: leave it out, and choose tasks that fit")
        if not str(kwargs.get("softmax_dtype") or "float32").endswith("float32"):
            raise ValueError(f"log-probabilities are float32 here, got softmax_dtype={kwargs['softmax_dtype']}")
        self.chunk = chunk
        if isinstance(pretrained, str) and is_adapter(pretrained) and "peft" not in kwargs:
            pretrained, kwargs = _base_and_adapter(pretrained, kwargs)
        if not isinstance(pretrained, str):  # from_pretrained refuses what it does not know, and HFLM takes anything
            for name in kwargs.keys() - inspect.signature(HFLM.__init__).parameters:
                raise TypeError(f"unexpected keyword argument {name!r} for a model in memory")
        self._split_over_processes(pretrained, kwargs)
        record = read_record(self.peft) if self.peft else None
        own = None
        if getattr(self.model.config.get_text_config(), "rope_patch", None):
            own = locate(self.model).record
        if requested is not None:
            if isinstance(options.get("layer_types"), str):
                options["layer_types"] = options["layer_types"].split("/")
            apply(self.model, requested, **options)
        elif own is not None and (record is None or adapter_config(self.peft).base_model_name_or_path != pretrained):
            verify_model(self.model)  # checks what the original loader built, before it is replaced
            reapply(self.model, own)
        elif record is not None:  # the patch of an adapter may have replaced that of its base
            reapply(self.model, record)
        if self.peft:
            check_adapter_tensors(self.peft, self.model)
            if requested or record or own:
                check_adapter_tables(self.peft, record, locate(self.model).record)
        # Else the tokenizer warns of texts beyond the length before the patch; prompts that do not fit are refused.
        self.tokenizer.model_max_length = max(self.tokenizer.model_max_length, self.max_length)
        self.reader = Reader(self.model)
        self.scheme = scheme
        if scheme != Scheme():
            stack = contextlib.ExitStack()
            self.maker = stack.enter_context(quantized(self.model, scheme))
            weakref.finalize(self, stack.close)  # a model in memory outlives this object

    def _split_over_processes(self, pretrained: Any, arguments: dict[str, Any]) -> None:
        """Load the model as HFLM does, one in each process of ``torchrun`` or ``accelerate launch``.

        HFLM splits the requests where a machine has two GPUs or more, and numbers the processes of each machine alone;
        here they are split wherever there are several processes, which are numbered over all machines.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # accelerate joins processes on CPUs only when told
        super().__init__(pretrained, **arguments)
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > 1:
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes

    # --- loading: what HFLM would pass on, take or report in its own way

    def _get_backend(self, config: Any, backend: str = "default", trust_remote_code: bool | None = False) -> None:
        if auto_class(config.model_type) is AutoModelForImageTextToText:
            self.AUTO_MODEL_CLASS = AutoModelForImageTextToText
            backend = "causal"
        super()._get_backend(config, backend=backend, trust_remote_code=trust_remote_code)
        if self.backend != "causal":
            raise ValueError(
                f"{config.model_type} is an encoder-decoder, and {MODEL_NAME} reads causal language models: use "
                "--model hf"
            )

    def get_model_info(self) -> dict[str, Any]:
        """Return what results say of the model: lm-eval's entries, the method, and the hash of every table in use."""
        info: dict[str, Any] = super().get_model_info()
        with contextlib.suppress(ValueError):  # an unpatched model without rotary tables
            inspection = inspect_model(self.model)
            info["rope_patch"] = {
                "method": inspection.method,
                "tables": {key_of(slot.layer_type): slot.fingerprint for slot in inspection.tables},
                "max_length": self.max_length,
                "chunk": self.chunk,
                "kv_cache": str(self.scheme),
            }
        return info

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's file of answers (``--use_cache``), which does not know whose answers they are.

        Raises:
            ValueError: the file holds answers of another model, or of this one under another patch or tokenizer.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            is_new = not len(answers)
            work = finished_work(self.model, answers, self.max_length)
            assert work is not None
            written = self.tok_decode(list(range(DECODED_TOKENS)))
            tokenizer = [self.tokenizer.get_vocab(), written, self.tok_encode(written), self.prefix_token_id]
            parts = {"model": work.identity, "length": self.max_length, "scheme": scheme_identity(self.scheme)}
            identity = result_cache.key(tokenizer=tokenizer, **parts)
            if not is_new and answers.get(IDENTITY_ENTRY) != identity:
                raise ValueError(
                    "the file of --use_cache holds answers of another model, patch, tokenizer or cache format: give "
                    "another path"
                )
            answers[IDENTITY_ENTRY] = identity
        super().set_cache_hook(cache_hook)


if MODEL_NAME not in model_registry:  # an entry point, or rope-patch-eval, may have named this class already
    model_registry.register(MODEL_NAME, target=RopePatchLM)
