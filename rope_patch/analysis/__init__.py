"""What a model does with its rotary pairs, measured on a text: streaming statistics of queries, keys and values."""
