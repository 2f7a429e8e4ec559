"""Blocks in which pixels or channels look at each other, as people write them: of one feature map (N, C, H, W)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Snippet = Callable[[Tensor], Any]


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
    probabilities = x[:, :3].flatten(2).softmax(2)
    features = x.flatten(2).permute(0, 2, 1)
    return torch.matmul(probabilities, features).permute(0, 2, 1).unsqueeze(3)


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


def coordinate_attention(x: Tensor) -> Tensor:
    h, w = x.shape[2:]
    rows, columns = x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)
    y = torch.cat([rows, columns], 2).sigmoid()
    a, b = torch.split(y, [h, w], 2)
    return x * a * b.permute(0, 1, 3, 2)


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


def all_pairs(x: Tensor) -> Tensor:
    """RAFT: each pixel with each."""
    b, c, h, w = x.shape
    f = x.view(b, c, h * w)
    return torch.matmul(f.transpose(1, 2), f).view(b, h, w, h, w) / c**0.5


def axial_attention(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    tokens = x.permute(0, 3, 2, 1).reshape(b * w, h, c)
    out = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    return out.view(b, w, h, c).permute(0, 3, 2, 1)


def criss_cross(x: Tensor) -> Tensor:
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
    soft = x[:, :3].flatten(2).softmax(1)
    return torch.einsum("bkn,bcn->bkc", soft, x.flatten(2)) - soft.sum(-1, keepdim=True)


def vit_tokens(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return torch.cat([tokens.mean(1, keepdim=True), tokens], 1)


def segformer_tokens(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    tokens = F.layer_norm(x.flatten(2).transpose(1, 2), (c,))
    return tokens.transpose(1, 2).reshape(b, c, h, w)


def pixels_by_pixels(x: Tensor) -> Tensor:
    pixels = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    return pixels.t() @ pixels


def projected_tokens(x: Tensor) -> Tensor:
    """A linear layer's output is contiguous, whatever its input is, and is viewed as a matrix of all tokens."""
    weight = torch.arange(5 * x.shape[1], dtype=x.dtype).sin().view(5, x.shape[1])
    tokens = F.linear(x.flatten(2).transpose(1, 2), weight)
    assert tokens.is_contiguous()
    return tokens.view(-1, 5)
