"""A run on disk: saved while it goes on, complete or not there at all, readable by any number of ranks."""
