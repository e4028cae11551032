"""The run directory: written while a run goes on, read afterwards."""
