"""Logs into batches: what a history is, how it is stored, and in which order it is read."""
