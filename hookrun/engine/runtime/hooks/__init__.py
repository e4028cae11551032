"""Registers each hook type with PyTorch: one class for each, found by its `hook_types`."""
