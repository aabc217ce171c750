"""Which samples are in step i: pure functions of (seed, epoch, step), for any number of ranks."""
