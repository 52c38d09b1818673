"""Prompts and data sets: sources, rendering with the chat template, loss masks, built-in prompts."""
