"""specdraft: train, export and evaluate draft heads for speculative decoding. Imports nothing heavy."""

__version__ = "0.1.0"
