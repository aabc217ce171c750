"""How much work a sample is, where it should be done, and moving it there. Works without TorchRec."""

from freescale.balance.assign import assign as assign
