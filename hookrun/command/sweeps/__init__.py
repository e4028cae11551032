"""The jobs of a command: a run, a sweep, the runs that an experiment needs."""
