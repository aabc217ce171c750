"""How much work a sample is, and where it should be done. Works without TorchRec."""
