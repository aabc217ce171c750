"""The step profiler: records on every rank where the time of a step goes, with one cause for every instant.

Works with any PyTorch trainer and does not depend on models or TorchRec.
"""
