"""Serving: a trained model as programs without this package, its weights, and `serve.py`, which answers requests."""
