"""Attention over jagged sequences.

Every token sees itself and what came before it; a candidate sees the history and itself, never another candidate.
`reference` says what is meant. `operators` is the operator of HSTU's attention and the one place where its
implementation is chosen: `fused` (Triton `kernels`, their blocks dealt by `work`) on a GPU, `blocks` on a CPU, with
`native` for the pairs where there is a C compiler and `pairs` where there is none. `softmax` is SASRec's.
"""
