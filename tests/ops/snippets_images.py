"""Losses, measures and rearrangements of images, as people write them: of one feature map (N, C, H, W)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def channel_shuffle(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


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


def coord_conv(x: Tensor) -> Tensor:
    b, _, h, w = x.shape
    ys = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(b, 1, h, w)
    xs = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(b, 1, h, w)
    return torch.cat([x, ys, xs], 1)


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


def prototype(x: Tensor) -> Tensor:
    mask = (x[:, :1].detach() > 0).to(x.dtype)
    return (x * mask).sum((2, 3)) / (mask.sum((2, 3)) + 1e-5)


def cosine_to_prototype(x: Tensor) -> Tensor:
    return F.cosine_similarity(x, prototype(x)[..., None, None], dim=1)


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


def pooled_channels_last(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of ConvNeXt and Swin, whose maps are channels_last: one window over everything."""
    flat, deep = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), x.unsqueeze(3)
    return F.adaptive_avg_pool2d(flat, 1), F.adaptive_avg_pool3d(
        deep.contiguous(memory_format=torch.channels_last_3d), 1
    )


def fourier_filter(x: Tensor) -> Tensor:
    """Global filter networks and Fourier neural operators: a weight for each frequency."""
    frequencies = torch.fft.rfft2(x, norm="ortho")
    return torch.fft.irfft2(frequencies * torch.polar(frequencies.abs() + 1, frequencies.real), s=x.shape[2:])


def lowest_frequencies(x: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = torch.fft.fftn(torch.complex(x, x.sin()), dim=(2, 3)).conj().resolve_conj()
    return torch.view_as_real(frequencies[:, :, :3, :3]), torch.fft.fft(x, dim=1).abs()
