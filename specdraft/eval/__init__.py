"""Acceptance and speed on held-out prompts, and their report."""
