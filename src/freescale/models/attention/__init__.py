"""Attention over jagged sequences.

Every token attends to the tokens of its sample before its limit, and to itself. The limit of a history token is its
position; that of a candidate is its anchor, the number of history tokens that it sees. `reference` defines the
semantics. `operators` holds the torch operators and selects the implementation of HSTU attention: `triton_launch` with
`triton_kernels` on a GPU, else `blocks`, with C code where there is a compiler. `tiles` holds the tile sizes.
"""
