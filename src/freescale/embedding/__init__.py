"""Sharded embedding tables: ownership of rows, their exchange, and their updates. Independent of models.

Ids are deduplicated first. The work and memory of a step depend on the ids of the batch, never on the table size.
"""
