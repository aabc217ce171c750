"""Our claims, measured where this runs: each way to train takes turns with the others over the same samples."""
