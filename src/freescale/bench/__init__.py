"""Benchmarks on this machine: each variant of training takes turns with the others over the same samples."""
