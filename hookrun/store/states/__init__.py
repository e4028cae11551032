"""Checkpoints and resumable states, and what is cut off when a run goes on from one."""
