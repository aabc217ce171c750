"""Simulates a run on other clusters, with the trainer's own schedule, placement and ledger on a simulated clock.

Does not import torch, use process groups or run a model: a step is its schedule and the cost of its samples.
"""
