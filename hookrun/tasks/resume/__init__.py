"""Resumable states of a run: what they hold, and how a run goes on from one."""
