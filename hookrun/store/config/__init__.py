"""Files of configuration, read under one guard."""
