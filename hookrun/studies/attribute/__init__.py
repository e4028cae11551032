"""Which part of an input a score depends on."""
