"""What the recipes and the studies share: data, collators, the loss and the trainer."""
