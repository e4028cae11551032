"""Text that a model continues under hooks, token by token."""
