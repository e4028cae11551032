"""Config folders and overrides composed by Hydra: its loader, and what is wrong on a command line."""

from hookrun.engine.values.private_names import require

require("hydra-core")
