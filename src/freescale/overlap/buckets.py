"""How gradients of the dense part are cut, so that all but the last of them travel behind the backward pass. Pure."""

_BUCKETS, _SMALLEST, _LARGEST = 16, 1 << 18, 25 << 20
"""Enough for the last to be short; none so small that a transfer is all latency, or larger than DDP's own."""


def bucket_bytes(dense: float) -> float:
    """At how many bytes a bucket is full, where the dense part has so many."""
    return min(max(dense / _BUCKETS, _SMALLEST), _LARGEST)
