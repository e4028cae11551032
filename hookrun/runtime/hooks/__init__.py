"""How each hook type is registered with PyTorch."""
