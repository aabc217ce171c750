"""Ways to move bytes between ranks, behind one Handle. Knows nothing of what the bytes mean."""
