"""What each task uses while it runs: batches, sums, records, resumable states, loggers. Begin with ../execute.py."""
