"""What fused kernels compute, by torch operators on the CPU: keyed randomness, the sampled softmax, the row update."""

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale import deterministic, hashing
from freescale.embedding.row_update import SortedRows
from freescale.models import keyed
from freescale.models.fused_launch import SampledRows, TokenLosses

_EPS = 1e-12


def splitmix64(z: Tensor) -> Tensor:
    """Hash integers."""
    return hashing.splitmix64(z)


def dropout(x: Tensor, token_keys: Tensor, *, salt: int, threshold: int) -> Tensor:
    """Drop elements, and scale the others."""
    kept = keyed.kept_elements(token_keys, x.shape[1], salt=salt, threshold=threshold)
    return x * kept / (1.0 - threshold / 0x10000)


def compute_token_losses(
    output: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float
) -> TokenLosses:
    """Return the loss of every token, the gradient of its output, and the scores."""
    sums = torch.promote_types(rows.dtype, torch.float32)
    query, sampled = output.to(sums), torch.cat([positive[:, None], negatives], dim=1)
    unit_query, unit_rows = F.normalize(query, dim=1), F.normalize(rows.to(sums), dim=1)[sampled]
    masked = F.pad(negatives == positive[:, None], (1, 0))
    scores = (torch.einsum("td,tkd->tk", unit_query, unit_rows) / temperature).masked_fill(masked, float("-inf"))
    log_total = scores.logsumexp(1)
    d_score = (scores - log_total[:, None]).exp()
    error = d_score[:, 1:].sum(1)
    d_score[:, 0] = -error
    d_unit = torch.einsum("tk,tkd->td", d_score, unit_rows) / temperature
    d_output = _project(d_unit, query).to(output.dtype)
    weight = 1.0 / (query.norm(dim=1).clamp(min=_EPS) * temperature)
    return TokenLosses(log_total - scores[:, 0], d_output, sampled.int(), scores, log_total, error, weight)


def compute_row_gradients(
    output: Tensor, rows: Tensor, losses: TokenLosses, sampled: SampledRows, gradient: Tensor
) -> Tensor:
    """Return the gradients of all rows."""
    d_score = (losses.scores - losses.log_total[:, None]).exp()
    d_score[:, 0] = -losses.error
    weighted = (d_score * losses.weight[:, None])[:, :, None] * output.to(d_score.dtype)[:, None]
    d_unit = torch.segment_reduce(weighted.flatten(0, 1)[sampled.order], "sum", offsets=sampled.offsets, unsafe=True)
    return (_project(d_unit, rows.to(d_score.dtype)) * gradient).to(rows.dtype)


def update_sorted_rows(
    weights: Tensor,
    sums: Tensor | None,
    ordered: SortedRows,
    gradients: Tensor,
    *,
    lr: float,
    eps: float,
    optimizer: str,
) -> None:
    """Update rows of a table in place, in the arithmetic of the CPU's shard."""
    rows, index = ordered.rows.unique_consecutive(return_inverse=True)
    total = deterministic.index_add_(weights.new_zeros(len(rows), weights.shape[1]), index, gradients[ordered.order])
    rate: Tensor | float = lr
    if sums is not None:
        square = total.square()
        square = square.mean(1, keepdim=True) if optimizer == "rowwise_adagrad" else square
        sums.index_add_(0, rows, square)
        rate = lr / sums.index_select(0, rows).sqrt_().add_(eps)
    weights.index_add_(0, rows, total.mul_(rate), alpha=-1)


def _project(d_unit: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of vectors from that of their unit vectors."""
    unit, norm = F.normalize(x, dim=1), x.norm(dim=1, keepdim=True)
    along = (d_unit * unit).sum(1, keepdim=True).where(norm > _EPS, 0.0)
    return (d_unit - along * unit) / norm.clamp(min=_EPS)
