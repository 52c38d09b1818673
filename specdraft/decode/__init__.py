"""The speculative decoder: cache, proposers, verification, engine."""
