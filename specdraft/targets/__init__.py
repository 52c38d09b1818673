"""The frozen target: loading, layout per architecture, features, and the embedded SmolLM2."""
