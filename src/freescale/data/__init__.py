"""Import logs, store user histories, and load them as batches in a deterministic order."""
