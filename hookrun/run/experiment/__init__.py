"""What is built and checked before anything runs: data, model, loss, metrics and the plan of the hooks."""
