"""The schedule of a step, the proof that it is safe, and its executor. Torch-free."""
