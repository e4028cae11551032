"""Where two runs differ."""
