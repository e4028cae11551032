"""The command line on top of Hydra: compose, check, and only then let Hydra make directories and run jobs."""
