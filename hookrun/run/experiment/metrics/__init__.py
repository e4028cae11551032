"""Losses and metrics: functions of rows, whose means are summed on the device."""
