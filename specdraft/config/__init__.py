"""Hydra's side: schemas, the configs folder, and conversion to the owners' dataclasses."""
