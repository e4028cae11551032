"""From text to a checked mapping: YAML with limits, interpolations, and arguments checked against their types."""
