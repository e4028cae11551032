"""The effect of a hook at many places on one metric."""
