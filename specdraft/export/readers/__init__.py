"""One file per layout of published heads, each with a ``READER``."""
