"""Checkpoints and exports of a run: written while it trains, complete or absent, readable on any world size."""
