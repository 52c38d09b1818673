"""Draft heads: one file per kind, found through ``base.head_kinds``. Importing this package does not import torch."""
