"""User code by name: which packages may be imported, how it is loaded, how it is identified."""
