"""What the tasks share: one pass over the data, its batches, losses, optimizers and progress."""
