"""Questions to captured rows: probes and similarity."""
