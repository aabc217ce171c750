"""Where the time of a step goes: recorded on every rank, every instant under exactly one cause.

Works for any PyTorch trainer: knows no model, no table and no TorchRec.
"""
