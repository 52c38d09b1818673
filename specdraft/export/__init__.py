"""Heads to and from the Hub and the serving engines."""
