"""The JSON Schema of experiments and hook sets, for editors: ``python -m hookrun.schema hookrun.schema.json``."""

import sys

from hookrun.command.schema import experiment_schema, main

__all__ = ["experiment_schema", "main"]

if __name__ == "__main__":
    sys.exit(main())
