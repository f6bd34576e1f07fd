"""The fine-tuning recipe: options, data, collators, the trainer, evaluation and results of a run."""
