"""Sequence models on jagged batches: HSTU and SASRec encoders, their attention and their losses. No process groups."""
