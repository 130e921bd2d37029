"""Benchmarks: a module for each command of `jaxpage bench`, and modules that several of them share.

Uses the engine's public names; the engine never imports it.
"""
