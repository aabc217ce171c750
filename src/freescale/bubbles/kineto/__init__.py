"""Import of what torch.profiler recorded of any trainer."""
