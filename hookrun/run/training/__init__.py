"""Training: epochs of steps. Begin with step.py."""
