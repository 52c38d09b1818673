"""specdraft: train, export and evaluate draft heads for speculative decoding."""
