"""The training loop and what it needs: optimizer, checkpoints, state, trackers."""
