"""Attention over jagged sequences.

Every token attends to itself and to earlier tokens. A candidate attends to the history and itself, never to another
candidate. `reference` defines the semantics. `operators` holds the torch operators and selects the implementation of
HSTU attention: `triton_launch` with `triton_kernels` on a GPU, else `blocks`, with C code where there is a compiler.
"""
