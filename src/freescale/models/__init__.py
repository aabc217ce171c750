"""Sequence models on jagged batches: HSTU, SASRec, their attention and losses. Knows no process group."""
