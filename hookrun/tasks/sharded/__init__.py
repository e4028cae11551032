"""Runs of several processes: what they sum, agree on, and cannot do as one process does."""
