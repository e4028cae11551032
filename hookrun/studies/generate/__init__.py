"""Text of a language model under hooks."""
