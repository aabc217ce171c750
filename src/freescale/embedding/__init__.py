"""Embedding tables over many ranks: who owns which rows, how they travel, how they are updated.

Ids are deduplicated before anything else is done with them. Work and memory of a step follow the ids of the batch,
never the rows of a table. Knows nothing of models.
"""
