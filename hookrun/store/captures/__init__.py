"""Captured tensors as shards of safetensors with an index of their rows: written during a run, read lazily."""
