"""Perplexity by position and by document, without the logits of all tokens in memory."""
