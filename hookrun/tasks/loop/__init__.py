"""Code that the tasks share: batches, passes over the data, losses, metrics, optimizers and progress."""
