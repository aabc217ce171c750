"""FreeScale: distributed training of sequence recommendation models without bubbles."""
