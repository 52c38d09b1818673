"""One file per format of exports, each with a ``FORMAT``."""
