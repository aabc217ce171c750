"""Load balancing: the cost of a sample, the assignment of samples to ranks, and their exchange. Needs no TorchRec."""

from freescale.balance.assign import assign as assign
