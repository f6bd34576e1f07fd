"""Callbacks of a training: our metrics where the Trainer evaluates, and an end where the loss is no number."""

from __future__ import annotations

import math
from typing import Any

from transformers import Trainer, TrainerCallback

from rope_patch.evaluation.suite import EvalSuite
from rope_patch.training.evaluate_run import evaluate_model, metrics


class EvaluationCallback(TrainerCallback):
    """Add perplexity by position and retrieval to each evaluation of a Trainer.

    The numbers are logged with the prefix ``eval_``, and ``metric_for_best_model="score"`` keeps the checkpoint that
    retrieves best. A Trainer evaluates only if it has an ``eval_dataset`` and ``eval_strategy`` is set.

    Args:
        trainer: the trainer that this callback is added to.
        suite: the prompts and windows.

    Example:
        ``trainer.add_callback(EvaluationCallback(trainer, EvalSuite(EvalSpec((4096,)), tokenizer)))``
    """

    def __init__(self, trainer: Trainer, suite: EvalSuite) -> None:
        self.trainer = trainer
        self.suite = suite
        model: Any = trainer.model
        for module in model.modules():
            # 4-bit layers of bitsandbytes on a CPU with AVX512-BF16: in eval mode they pack their weights anew, for
            # good, and are trained wrongly after that.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the model, log the numbers, and give them to the choice of the best checkpoint."""
        model: Any = self.trainer.model
        scores = metrics(evaluate_model(self.suite, model))
        numbers = {f"eval_{name}": value for name, value in scores.items()}
        self.trainer.log(dict(numbers))
        kwargs["metrics"].update(numbers)


class FiniteLossCallback(TrainerCallback):
    """End a training whose loss is NaN or infinite, as all later losses would be.

    The loss is looked at where it is logged, so that no step waits for the GPU. It needs
    ``logging_nan_inf_filter=False``: by default a Trainer logs the mean of recent losses in its place.
    """

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **kwargs: Any) -> None:
        """Look at the loss.

        Raises:
            FloatingPointError: the loss is NaN or infinite.
        """
        loss = float(logs.get("loss", 0.0))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {state.global_step} is {loss}: use a lower learning rate, or more warm-up steps; "
                "earlier checkpoints are kept"
            )
