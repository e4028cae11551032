"""Four small models as others write them, each with its data: plain PyTorch that knows nothing of hookrun."""
