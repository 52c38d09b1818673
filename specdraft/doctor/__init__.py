"""Checks of a user's own target and data before a long run: each with a verdict, its evidence and what to do."""
