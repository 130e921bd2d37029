"""Measurements, a module each: what `jaxpage bench` names, and beneath it what several of them need.

Uses the public names of the engine; nothing in the engine knows of it.
"""
