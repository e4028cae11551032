"""An experiment, from what it names to its finished directory."""
