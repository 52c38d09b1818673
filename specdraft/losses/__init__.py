"""Alignment of drafts with labels and teacher, loss terms and training metrics."""
