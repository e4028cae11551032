"""One run: from an experiment to its finished directory. Begin with execute.py."""
