"""What probe, similarity and folds compute from the captures of a run."""
