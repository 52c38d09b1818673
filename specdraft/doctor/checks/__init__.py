"""One file for each group of checks; every function entered with ``@check`` is found by the registry."""
