"""Models of other libraries in torch, as one writes them. Each is defined only here."""

from __future__ import annotations

import itertools
import math

import torch  # pyrefly: ignore[missing-import]
from torch import nn  # pyrefly: ignore[missing-import]
from torch.nn import functional  # pyrefly: ignore[missing-import]

_BUCKETS = 128


def layers(*sizes: int, activated: bool = False):
    """Linear layers with ReLU between them; with `activated`, also after the last one."""
    parts = []
    for a, b in itertools.pairwise(sizes):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(parts if activated else parts[:-1]))


class DLRM(nn.Module):
    """DLRM: logits from dense columns `[batch, dense]` and rows `[batch, tables, dim]`."""

    def __init__(self, dense: int, tables: int, dim: int, bottom: tuple, top: tuple):
        super().__init__()
        vectors = tables + 1
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1))
        self.bottom = layers(dense, *bottom, dim, activated=True)
        self.top = layers(dim + vectors * (vectors - 1) // 2, *top, 1)

    def forward(self, dense, rows):
        given = self.bottom(dense)
        rows = torch.cat([given[:, None], rows.to(given.dtype)], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([given, pairs], 1))[:, 0].float()


class Clicks(nn.Module):
    """The loss of a DLRM whose tables are stored as a single one, from ids `[batch, tables]`."""

    def __init__(self, dense: int, rows: tuple[int, ...], dim: int, hidden: tuple):
        super().__init__()
        firsts = [0, *itertools.accumulate(rows)][:-1]
        self.register_buffer("firsts", torch.tensor(firsts))
        self.rows = nn.Embedding(sum(rows), dim)
        nn.init.uniform_(self.rows.weight, -0.01, 0.01)
        self.network = DLRM(dense, len(rows), dim, hidden, hidden)

    def forward(self, dense, ids, labels):
        logits = self.network(dense, self.rows(ids + self.firsts))
        return functional.binary_cross_entropy_with_logits(logits, labels)


class Shared(nn.Module):
    """Logits of two labels, from experts that are shared or belong to a label, and a tower for
    each label.
    """

    def __init__(self, kind: str, inputs: int, hidden: tuple):
        super().__init__()
        self.kind, count = kind, {"SharedBottom": 1, "MMoE": 4, "PLE": 6}[kind]
        stacks = (layers(inputs, *hidden, activated=True) for _ in range(count))
        self.experts = nn.ModuleList(stacks)
        gates = range(0 if kind == "SharedBottom" else 2)
        self.gates = nn.ModuleList(nn.Linear(inputs, 4) for _ in gates)
        self.towers = nn.ModuleList(layers(hidden[-1], 32, 1) for _ in range(2))

    def forward(self, x):
        found = [expert(x) for expert in self.experts]
        logits = []
        for i, tower in enumerate(self.towers):
            # The experts of this label, then the shared ones.
            mine = found[2 * i : 2 * i + 2] + found[4:] if self.kind == "PLE" else found
            y = mine[0]
            if self.gates:
                weights = functional.softmax(self.gates[i](x), -1)[..., None]
                y = (weights * torch.stack(mine, 1)).sum(1)
            logits.append(tower(y)[:, 0])
        return torch.stack(logits, 1)


class DIN(nn.Module):
    """The loss of a DIN, which weights a history by the candidate; `top` names the kind of its
    layers for two labels.
    """

    def __init__(
        self, dense: int, ids: int, dim: int, attention: tuple, hidden: tuple, top: str
    ):
        super().__init__()
        self.user, self.item = nn.Embedding(ids, dim), nn.Embedding(ids, dim)
        self.attention = layers(4 * dim, *attention, 1)
        inputs = dense + 3 * dim
        self.hidden = Shared(top, inputs, hidden) if top else layers(inputs, *hidden, 1)

    def forward(self, dense, user, item, had, labels):
        history = self.item(had.clamp(min=0)) * (had >= 0)[..., None]
        candidate = self.item(item)
        both = candidate[:, None].expand_as(history)
        unit = torch.cat([history, both, history - both, history * both], -1)
        summed = (self.attention(unit) * history).sum(1)
        x = torch.cat([dense, self.user(user), candidate, summed], -1)
        logits = self.hidden(x).float().reshape(labels.shape)
        return functional.binary_cross_entropy_with_logits(logits, labels)


class Autoencoder(nn.Module):
    """The loss of an autoencoder: softmax over all items; a row has several labels."""

    def __init__(self, items: int, hidden: int):
        super().__init__()
        self.rows = nn.EmbeddingBag(items, hidden, mode="sum")
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.output = nn.Linear(hidden, items)

    def forward(self, indices, ends, rows, lengths):
        scores = self.output(torch.tanh(self.rows(indices, ends) + self.bias)).float()
        mine = scores[rows, indices].sum()
        return ((lengths * scores.logsumexp(1)).sum() - mine) / len(lengths)


class _Softmax(nn.Module):
    """A block of SASRec, with softmax attention."""

    def __init__(self, width: int, heads: int, length: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, buckets):
        parts = self.qkv(self.norm1(x)).chunk(3, 2)
        q, k, v = (p.unflatten(2, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.mixed(y.transpose(1, 2).flatten(2))
        x = x + functional.dropout(y, self.dropout)
        y = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + functional.dropout(y, self.dropout)


class _Pointwise(nn.Module):
    """A block of HSTU on padded histories, whose scores are computed by einsum."""

    def __init__(self, width: int, heads: int, length: int, dropout: float):
        super().__init__()
        self.heads, self.length, self.dropout = heads, length, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.products = nn.Linear(width, 4 * width, bias=False)
        self.mixed = nn.Linear(width, width)
        self.place_bias = nn.Parameter(0.02 * torch.randn(length))
        self.time_bias = nn.Parameter(torch.zeros(_BUCKETS))
        place = torch.arange(length)
        apart = place[:, None] - place[None]
        self.register_buffer("apart", apart.clamp(min=0))
        self.register_buffer("before", apart >= 0)

    def forward(self, x, buckets):
        u, *parts = functional.silu(self.products(self.norm1(x))).chunk(4, 2)
        v, q, k = (p.unflatten(2, (self.heads, -1)).transpose(1, 2) for p in parts)
        bias = self.place_bias[self.apart][None] + self.time_bias[buckets]
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) + bias[:, None]
        weights = functional.silu(scores) / self.length * self.before
        y = torch.einsum("bhts,bhsd->bhtd", weights, v)
        y = u * self.norm2(y.transpose(1, 2).flatten(2))
        return x + self.mixed(functional.dropout(y, self.dropout))


class Sequences(nn.Module):
    """SASRec ("sasrec") or HSTU ("hstu"), and its loss over sampled negatives."""

    def __init__(self, kind: str, items: int, length: int, *, width, heads, dropout):
        super().__init__()
        block = {"hstu": _Pointwise, "sasrec": _Softmax}[kind]
        self.timed, self.dropout = kind == "hstu", dropout
        self.items = nn.Parameter(0.02 * torch.randn(items, width))
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        made = (block(width, heads, length, dropout) for _ in range(2))
        self.blocks = nn.ModuleList(made)
        self.norm = nn.LayerNorm(width)

    def forward(self, given, times, wanted, targets, negatives):
        scale, temperature = self.items.shape[1] ** 0.5, 0.1
        x = functional.embedding(given, self.items) * scale + self.places
        x, buckets = functional.dropout(x, self.dropout), None
        if self.timed:
            since = (times[:, :, None] - times[:, None]).abs().clamp(min=1)
            buckets = (since.log() / 0.301).long().clamp(max=_BUCKETS - 1)
        for block in self.blocks:
            x = block(x, buckets)
        h = functional.normalize(self.norm(x).flatten(0, 1)[wanted], dim=1)
        rows = functional.embedding(torch.cat([targets, negatives]), self.items)
        own, others = functional.normalize(rows, dim=1).tensor_split([len(targets)])
        mine = (h * own).sum(1, keepdim=True) / temperature
        scores = h @ others.T / temperature
        scores = scores.masked_fill(targets[:, None] == negatives[None], -1e30)
        stands_for = math.log(len(self.items) / len(negatives))
        scores = torch.cat([mine, scores + stands_for], 1).float()
        return functional.cross_entropy(scores, torch.zeros_like(targets))
