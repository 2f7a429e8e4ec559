"""Lines of code as people write them in segmentation, detection, medical and video models.

Each is a function of one feature map (N, C, H, W), with constants that it makes itself as models do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Snippet = Callable[[Tensor], Any]

SHAPE = (4, 8, 12, 8)
UNEVEN = (3, 8, 11, 7)


def gram(x: Tensor) -> Tensor:
    features = x.flatten(2)
    return features @ features.transpose(1, 2) / features.shape[-1]


def gram_of_view(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    features = x.view(b, c, h * w)
    return torch.bmm(features, features.transpose(1, 2))


def linear_attention(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    q, k, v = (t.flatten(2) for t in (x.tanh(), x.sin(), x))
    context = torch.einsum("bdn,ben->bde", k.softmax(-1), v)
    return torch.einsum("bde,bdn->ben", context, q.softmax(1)).view(b, c, h, w)


def linear_attention_with_heads(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    q, k, v = (t.reshape(b, 2, c // 2, h * w) for t in (x.tanh(), x.sin(), x))
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    return torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2)).reshape(b, c, h, w)


def channel_attention(x: Tensor) -> Tensor:
    """Dual attention networks."""
    b, c, h, w = x.shape
    energy = torch.bmm(x.view(b, c, -1), x.view(b, c, -1).permute(0, 2, 1))
    attention = (energy.max(-1, keepdim=True)[0].expand_as(energy) - energy).softmax(-1)
    return torch.bmm(attention, x.view(b, c, -1)).view(b, c, h, w) + x


def non_local(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    theta, phi, g = (t.view(b, c, -1) for t in (x.tanh(), x.sin(), x))
    weights = torch.matmul(theta.permute(0, 2, 1), phi).softmax(-1)
    return torch.matmul(weights, g.permute(0, 2, 1)).permute(0, 2, 1).reshape(b, c, h, w) + x


def global_context(x: Tensor) -> Tensor:
    """GCNet: attention pooling over space."""
    mask = x.mean(1, keepdim=True).flatten(2).softmax(-1)
    context = torch.matmul(x.flatten(2).unsqueeze(1), mask.unsqueeze(-1))
    return x + context.view(x.shape[0], x.shape[1], 1, 1)


def object_context(x: Tensor) -> Tensor:
    """OCRNet: features of soft regions."""
    b, c, h, w = x.shape
    probabilities = x[:, :3].flatten(2).softmax(2)
    features = x.flatten(2).permute(0, 2, 1)
    return torch.matmul(probabilities, features).permute(0, 2, 1).unsqueeze(3)


def channel_shuffle(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def window_partition(x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    b, h, w, c = x.shape
    windows = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c)
    back = (windows * 2).view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous()
    return back.view(b, h, w, c).permute(0, 3, 1, 2)


def shifted_windows(x: Tensor) -> Tensor:
    return torch.roll(window_partition(torch.roll(x, (-1, -1), (2, 3))), (1, 1), (2, 3))


def window_attention(x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    b, h, w, c = x.shape
    tokens = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    q = tokens.reshape(-1, 4, 2, c // 2).transpose(1, 2)
    out = ((q @ q.transpose(-2, -1)).softmax(-1) @ q).transpose(1, 2).reshape(-1, 4, c)
    return out.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)


def padded(snippet: Snippet) -> Snippet:
    """Swin pads what does not divide."""

    def run(x: Tensor) -> Any:
        return snippet(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)))

    return run


def patch_merging(x: Tensor) -> Tensor:
    x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)).permute(0, 2, 3, 1)
    return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)


def space_to_depth(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def dice(x: Tensor) -> Tensor:
    p = x.softmax(1)
    target = F.one_hot(x.detach().argmax(1), x.shape[1]).permute(0, 3, 1, 2).to(p.dtype)
    return 1 - (2 * (p * target).sum((0, 2, 3)) + 1) / (p.sum((0, 2, 3)) + target.sum((0, 2, 3)) + 1)


def one_hot_by_scatter(x: Tensor) -> Tensor:
    labels = x.detach().argmax(1, keepdim=True)
    return x * torch.zeros_like(x).scatter_(1, labels, 1.0)


def flat_dice(x: Tensor) -> Tensor:
    p = x.sigmoid().reshape(x.shape[0], -1)
    t = (x.detach() > 0).to(x.dtype).reshape(x.shape[0], -1)
    return 1 - 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1))


def tversky(x: Tensor) -> Tensor:
    p, t = x.sigmoid().view(-1), (x.detach() > 0).to(x.dtype).view(-1)
    hits = (p * t).sum()
    return hits / (hits + 0.3 * ((1 - t) * p).sum() + 0.7 * (t * (1 - p)).sum())


def focal(x: Tensor) -> Tensor:
    target = (x.detach() > 0.5).to(x.dtype)
    ce = F.binary_cross_entropy_with_logits(x, target, reduction="none")
    p = torch.exp(-ce)
    return (torch.where(target > 0, 0.25, 0.75) * (1 - p) ** 2 * ce).mean()


def ohem(x: Tensor) -> Tensor:
    """The hardest pixels: their mean loss."""
    loss = F.cross_entropy(x, x.detach().argmin(1), reduction="none").flatten()
    return loss.topk(20)[0].mean()


def boundary(x: Tensor) -> Tensor:
    eroded = -F.max_pool2d(-x, 3, 1, 1)
    return F.relu(x - eroded)


def total_variation(x: Tensor) -> Tensor:
    return (x[:, :, 1:] - x[:, :, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def soft_argmax(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    p = x.flatten(2).softmax(-1).view(b, c, h, w)
    ys = torch.arange(h, dtype=x.dtype)
    return (p.sum(3) * ys).sum(2)


def heatmap_peak(x: Tensor) -> Any:
    values, places = x.view(x.shape[0], x.shape[1], -1).max(-1)
    return values, places % x.shape[3], places // x.shape[3]


def peaks(x: Tensor) -> Any:
    """CenterNet."""
    kept = (F.max_pool2d(x, 3, 1, 1) == x).to(x.dtype) * x
    scores, places = kept.view(x.shape[0], x.shape[1], -1).topk(5)
    return scores, places


def cam_pooling(x: Tensor) -> Tensor:
    return F.softmax(x.flatten(2), -1).mul(x.flatten(2)).sum(-1)


def gem(x: Tensor) -> Tensor:
    return F.avg_pool2d(x.clamp(min=1e-6).pow(3), x.shape[-2:]).pow(1 / 3)


def coordinate_attention(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    rows, columns = x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)
    y = torch.cat([rows, columns], 2).sigmoid()
    a, b = torch.split(y, [h, w], 2)
    return x * a * b.permute(0, 1, 3, 2)


def coord_conv(x: Tensor) -> Tensor:
    b, _, h, w = x.shape
    ys = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(b, 1, h, w)
    xs = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(b, 1, h, w)
    return torch.cat([x, ys, xs], 1)


def spatial_gate(x: Tensor) -> Tensor:
    y = torch.cat([x.max(1, keepdim=True)[0], x.mean(1, keepdim=True)], 1)
    return x * y.sum(1, keepdim=True).sigmoid()


def squeeze_excite(x: Tensor) -> Tensor:
    b, c = x.shape[:2]
    return x * F.adaptive_avg_pool2d(x, 1).view(b, c).sigmoid().view(b, c, 1, 1)


def selective_kernel(x: Tensor) -> Tensor:
    both = torch.stack([x, x.tanh()], 1)
    attention = both.sum(1).mean((2, 3)).unsqueeze(1).repeat(1, 2, 1).softmax(1)
    return (both * attention[..., None, None]).sum(1)


def simam(x: Tensor) -> Tensor:
    n = x.shape[2] * x.shape[3] - 1
    d = (x - x.mean(dim=[2, 3], keepdim=True)).pow(2)
    return x * (d / (4 * (d.sum(dim=[2, 3], keepdim=True) / n + 1e-4)) + 0.5).sigmoid()


def adaptive_instance_norm(x: Tensor) -> Tensor:
    flat = x.view(x.shape[0], x.shape[1], -1)
    mean, std = flat.mean(2).view(*x.shape[:2], 1, 1), (flat.var(2) + 1e-5).sqrt().view(*x.shape[:2], 1, 1)
    return (x - mean) / std


def min_max_normalised(x: Tensor) -> Tensor:
    flat = x.view(x.shape[0], -1)
    low, high = flat.min(1, keepdim=True)[0], flat.max(1, keepdim=True)[0]
    return ((flat - low) / (high - low)).view(x.shape)


def percentile_normalised(x: Tensor) -> Tensor:
    low, high = torch.quantile(x, 0.05), torch.quantile(x, 0.95)
    return ((x - low) / (high - low)).clamp(0, 1)


def local_correlation(x: Tensor) -> Tensor:
    """Cost volume of optical flow."""
    padded = F.pad(x, (1, 1, 1, 1))
    h, w = x.shape[2:]
    return torch.stack([(x * padded[:, :, i : i + h, j : j + w]).mean(1) for i in range(3) for j in range(3)], 1)


def all_pairs(x: Tensor) -> Tensor:
    """RAFT: each pixel with each."""
    b, c, h, w = x.shape
    f = x.view(b, c, h * w)
    return torch.matmul(f.transpose(1, 2), f).view(b, h, w, h, w) / c**0.5


def disparity(x: Tensor) -> Tensor:
    return (x.softmax(1) * torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1, 1)).sum(1)


def involution(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    patches = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
    return (patches * x.mean(1, keepdim=True).unsqueeze(2)).sum(2)


def fold_and_unfold(x: Tensor) -> Tensor:
    return F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)


def temporal_shift(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:-1, :2] = x[1:, :2]
    out[1:, 2:4] = x[:-1, 2:4]
    out[:, 4:] = x[:, 4:]
    return out


def frames(x: Tensor) -> Tensor:
    nt, c, h, w = x.shape
    return x.view(nt // 1, 1, c, h, w).transpose(1, 2).mean(2)


def axial_attention(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    tokens = x.permute(0, 3, 2, 1).reshape(b * w, h, c)
    out = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    return out.view(b, w, h, c).permute(0, 3, 2, 1)


def criss_cross(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    rows = torch.einsum("bchw,bciw->bhiw", x, x)
    columns = torch.einsum("bchw,bchj->bhwj", x, x)
    return torch.cat([rows.permute(0, 1, 3, 2), columns], -1).softmax(-1)


def transposed_attention(x: Tensor) -> Tensor:
    """Restormer."""
    b, c, h, w = x.shape
    q = F.normalize(x.reshape(b, 2, c // 2, h * w), dim=-1)
    attn = (q @ q.transpose(-2, -1)).softmax(-1)
    return (attn @ q).reshape(b, c, h, w)


def cluster_assignment(x: Tensor) -> Tensor:
    """NetVLAD."""
    b, c = x.shape[:2]
    soft = x[:, :3].flatten(2).softmax(1)
    return torch.einsum("bkn,bcn->bkc", soft, x.flatten(2)) - soft.sum(-1, keepdim=True)


def prototype(x: Tensor) -> Tensor:
    mask = (x[:, :1].detach() > 0).to(x.dtype)
    return (x * mask).sum((2, 3)) / (mask.sum((2, 3)) + 1e-5)


def cosine_to_prototype(x: Tensor) -> Tensor:
    return F.cosine_similarity(x, prototype(x)[..., None, None], dim=1)


def vit_tokens(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return torch.cat([tokens.mean(1, keepdim=True), tokens], 1)


def segformer_tokens(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    tokens = F.layer_norm(x.flatten(2).transpose(1, 2), (c,))
    return tokens.transpose(1, 2).reshape(b, c, h, w)


def deep_supervision(x: Tensor) -> Tensor:
    small = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
    return F.mse_loss(F.interpolate(small, size=x.shape[2:], mode="bilinear", align_corners=False), x.detach())


def confusion(x: Tensor) -> Tensor:
    c = x.shape[1]
    predicted, target = x.detach().argmax(1), x.detach().argmin(1)
    return torch.bincount((target * c + predicted).view(-1), minlength=c * c).view(c, c)


def set_by_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = 0.5
    return y


def set_by_indices(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, [0, 3]] = 1.0
    y[:, [1, 2]] = x[:, [2, 1]]
    return y


def cross_norm(x: Tensor) -> Tensor:
    std, mean = torch.std_mean(x, (2, 3), keepdim=True)
    return (x - mean) / (std + 1e-5)


def instance_weights(x: Tensor) -> Tensor:
    return x * (x.detach() > 0).any(1, keepdim=True) * (x.detach() < 3).all(3, keepdim=True)


SNIPPETS: dict[str, Snippet] = {
    "einsum gram": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "gram": gram,
    "gram of a view": gram_of_view,
    "linear attention": linear_attention,
    "linear attention, heads": linear_attention_with_heads,
    "channel attention": channel_attention,
    "non-local": non_local,
    "global context": global_context,
    "object context": object_context,
    "spatial softmax": lambda x: x.flatten(2).softmax(-1),
    "max over space": lambda x: tuple(x.view(x.shape[0], x.shape[1], -1).max(-1)),
    "channel shuffle": channel_shuffle,
    "window partition": padded(window_partition),
    "shifted windows": padded(shifted_windows),
    "window attention": padded(window_attention),
    "patch merging": patch_merging,
    "space to depth": padded(space_to_depth),
    "dice": dice,
    "one-hot by scatter": one_hot_by_scatter,
    "flat dice": flat_dice,
    "tversky": tversky,
    "focal": focal,
    "ohem": ohem,
    "boundary": boundary,
    "total variation": total_variation,
    "soft argmax": soft_argmax,
    "heatmap peak": heatmap_peak,
    "peaks": peaks,
    "cam pooling": cam_pooling,
    "gem": gem,
    "coordinate attention": coordinate_attention,
    "coord conv": coord_conv,
    "spatial gate": spatial_gate,
    "squeeze-excite": squeeze_excite,
    "selective kernel": selective_kernel,
    "simam": simam,
    "adain": adaptive_instance_norm,
    "min-max": min_max_normalised,
    "percentiles": percentile_normalised,
    "local correlation": local_correlation,
    "all pairs": all_pairs,
    "disparity": disparity,
    "involution": involution,
    "fold of unfold": fold_and_unfold,
    "temporal shift": temporal_shift,
    "frames": frames,
    "axial attention": axial_attention,
    "criss-cross": criss_cross,
    "transposed attention": transposed_attention,
    "netvlad": cluster_assignment,
    "prototype": prototype,
    "cosine to prototype": cosine_to_prototype,
    "class token": vit_tokens,
    "segformer": segformer_tokens,
    "deep supervision": deep_supervision,
    "confusion": confusion,
    "one_hot": lambda x: F.one_hot(x.detach().argmax(1), 8),
    "one_hot, open": lambda x: F.one_hot(x.detach().argmax(1)),
    "masked_select": lambda x: x.masked_select(x.detach() > 0).sum(),
    "x[mask]": lambda x: x[x.detach() > 0].mean(),
    "x[mask], none": lambda x: x[x.detach() > 0],
    "nonzero": lambda x: (x.detach() > 1).nonzero(),
    "set by mask": set_by_mask,
    "set by indices": set_by_indices,
    "where": lambda x: torch.where(x > 0, x, x.mean()),
    "masked_fill": lambda x: x.masked_fill(x.detach() < 0, -1e9).softmax(1),
    "cumsum": lambda x: x.cumsum(2).cumsum(3),
    "cumprod": lambda x: x.cumprod(2),
    "sort": lambda x: tuple(x.sort(2)),
    "sort channels": lambda x: tuple(x.sort(1)),
    "argsort": lambda x: x.detach().argsort(3),
    "topk": lambda x: tuple(x.topk(3, 2)),
    "topk channels": lambda x: tuple(x.topk(3, 1)),
    "median": lambda x: x.median(),
    "median of rows": lambda x: tuple(x.median(2)),
    "median of space": lambda x: x.flatten(2).median(-1)[0],
    "kthvalue": lambda x: tuple(x.kthvalue(3, 2)),
    "quantile": lambda x: torch.quantile(x, 0.3, 2),
    "std_mean": cross_norm,
    "var_mean": lambda x: torch.var_mean(x, (0, 2, 3)),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "prod": lambda x: x.prod(2),
    "any and all": instance_weights,
    "histc": lambda x: torch.histc(x.detach(), 10, -2, 2),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "normalize": lambda x: F.normalize(x.flatten(2), dim=2),
    "normalize channels": lambda x: F.normalize(x, dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.tanh(), dim=1),
    "cosine of space": lambda x: F.cosine_similarity(x.flatten(1), x.tanh().flatten(1)),
    "pairwise_distance": lambda x: F.pairwise_distance(x.flatten(1), x.tanh().flatten(1)),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "diff": lambda x: x.diff(dim=2),
    "flip": lambda x: x.flip(2, 3),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "transposed product": lambda x: x @ x.transpose(2, 3),
    "outer of rows": lambda x: x.transpose(2, 3) @ x,
    "repeat_interleave": lambda x: x.repeat_interleave(2, 2),
    "tile": lambda x: x.tile(1, 1, 2, 1),
    "meshgrid": lambda x: x * torch.meshgrid(x[0, 0, :, 0], x[0, 0, 0], indexing="ij")[0],
    "gather": lambda x: x.gather(1, x.detach().argmax(1, keepdim=True)),
    "gather rows": lambda x: x.gather(2, x.detach().argsort(2)[:, :, :3]),
    "take_along_dim": lambda x: x.take_along_dim(x.detach().argmax(2, keepdim=True), 2),
    "cdist": lambda x: torch.cdist(x.flatten(2).transpose(1, 2), x.flatten(2).transpose(1, 2)[:, :4] + 3),
    "chunk": lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1],
    "baddbmm": lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2, :, : x.shape[3]].transpose(1, 2) @ x[:, 3]),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0, 2, 3], [0, 2, 3])),
    "mm of rows": lambda x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).t() @ x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]),
    "covariance": lambda x: torch.cov(x.permute(1, 0, 2, 3).flatten(1)),
    "unique": lambda x: x.detach().argmax(1).unique(),
    "item": lambda x: x * float(x.detach().max()),
    "clamp by quantity": lambda x: torch.minimum(x, x.amax((2, 3), keepdim=True) * 0.5),
    "searchsorted": lambda x: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)),
    "index_select": lambda x: x.index_select(2, torch.tensor([0, 2, 5])),
    "lerp": lambda x: torch.lerp(x, x.roll(1, 2), 0.3),
    "movedim": lambda x: x.movedim(1, -1).reshape(x.shape[0], -1, x.shape[1]).sum(1),
    "swap batch and channels": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1),
}  # fmt: skip
