"""Serving engines on a CPU: how each is run on an export, in its own environment, and held against our decoder."""
