"""Tracks which tokens each call of the model computes, and finds the positions that `tokens` selects."""
