"""What probe and similarity compute from the captures of a run."""
