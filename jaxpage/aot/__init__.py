"""Ahead-of-time compilation: whether a model fits a chip, how fast it can be at best, and executables for it."""
