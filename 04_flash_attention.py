# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy>=1.26", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""How can attention be exact without ever storing its n x n weights?

Softmax can be computed a block at a time, if what has been added up is rescaled when a larger score turns up.
So a tile of scores is made, used and forgotten, and memory grows with n instead of n^2. You will see
  - what n x n weights weigh, beside what tiles leave behind: one number a row;
  - the tiles in numpy for one head, then batched, causal or not, with a backward pass by hand;
  - their outputs and gradients beside the library's, both held against float64;
  - bytes counted through a fast memory of M numbers: n^2 d^2 / M against n d + n^2;
  - time and peak memory for n up to 8,192: the obvious way, tiles in plain torch, the library's kernel.

    python 04_flash_attention.py            80 s on two cores; 7 GB, or what fits half of the free memory
    python 04_flash_attention.py --quick    the same in miniature, under ten seconds

Notation (example)
    B, h      sequences in a batch, heads (1, 8)       i, I  a row of scores, a block of rows: queries
    n         tokens in a sequence (4,096)             j, J  a column, a block of columns: keys
    n_q, n_k  where queries and keys differ in number  M     numbers that fit the fast memory (58,112)
    d         width of a head (64)                     s     scores q k^T / sqrt(d);  p = e^(s - m)
"""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import common
from common import CheckFailed, Table

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

NAME = Path(__file__).stem
HEADS, WIDTH = 8, 64  # of what is measured
ROWS, COLUMNS = 256, 256  # a tile of 8 heads takes 2 MB, and stays in the cache
SIZES, QUICK_SIZES = (512, 1024, 2048, 4096, 8192), (512,)
SHARED = 227 * 1024  # bytes of shared memory that an H100 gives a block of threads (CUDA guide)
H100 = 80e9  # bytes of memory
KERNELS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


# %% 1. The problem: n x n weights
def weights_bytes(n: int, heads: int, s: int = 2) -> int:
    """Bytes of the attention weights of one sequence: n x n numbers of s bytes for each head."""
    return heads * n * n * s


def problem_table() -> Table:
    """What must be stored for a backward pass: O(n^2) the obvious way, O(n) in tiles."""
    rows = []
    for n in (1024, 8192, 32_768, 131_072, 1_048_576):
        n_squared, inputs = weights_bytes(n, 32), 4 * 32 * n * 128 * 2
        rows.append((f"{n:,}", n_squared / 1e9, n_squared / H100, inputs / 1e9, 32 * n * 4 / 1e9))
    head = "n|n x n weights, GB|of an H100's 80 GB|q, k, v, o, GB|tiles keep, GB"
    note = "Tiles keep the logarithm of each row's sum of exponentials, in 32 bit: one number for n weights."
    return Table("a layer of 32 heads of 128 in 16 bit stores:", head, "|,.3f|.1%|,.3f|.4f", rows, note)


# %% 2. The idea, one head in numpy
def attention_one_head(Q, K, V, S, O, rows: int, columns: int) -> None:
    """Write softmax(Q K^T / sqrt(d)) V to O, by way of the scores S (n_q, n_k): three passes over them."""
    (n_q, d), n_k = Q.shape, len(K)
    blocks, strips = range(0, n_q, rows), range(0, n_k, columns)
    for i in blocks:
        q = Q[i : i + rows] / math.sqrt(d)
        for j in strips:
            S[i : i + rows, j : j + columns] = q @ K[j : j + columns].T
    for i in range(n_q):
        p = np.exp((s := S[i]) - s.max())
        S[i] = p / p.sum()
    for i in blocks:
        O[i : i + rows] = sum(S[i : i + rows, j : j + columns] @ V[j : j + columns] for j in strips)


def flash_one_head(Q, K, V, O, rows: int, columns: int) -> None:
    """The same without S: Q (n_q, d), K (n_k, d), V (n_k, d_v), O (n_q, d_v), in tiles of rows x columns.

    FlashAttention-2 (Dao 2023), algorithm 1: a block of queries stays, the keys and values pass by.
    """
    (n_q, d), n_k = Q.shape, len(K)
    for i in range(0, n_q, rows):
        q = Q[i : i + rows] / math.sqrt(d)
        m = np.full((len(q), 1), -np.inf)  # largest score so far
        l = np.zeros((len(q), 1))  # sum of e^(s - m) so far
        o = np.zeros((len(q), V.shape[1]))
        for j in range(0, n_k, columns):
            s = q @ K[j : j + columns].T
            # m' = max(m, max_j s_j)
            m_new = np.maximum(m, s.max(1, keepdims=True))
            # p_j = e^(s_j - m')
            p = np.exp(s - m_new)
            # l' = e^(m - m') l + sum_j p_j
            l = np.exp(m - m_new) * l + p.sum(1, keepdims=True)
            # o' = e^(m - m') o + sum_j p_j v_j
            o = np.exp(m - m_new) * o + p @ V[j : j + columns]
            m = m_new
        O[i : i + rows] = o / l


def source_lines(seed: int) -> str:
    """The check of the source, and what its docstring would give."""
    Q, K, V = np.random.default_rng(seed).standard_normal((3, 64, 32))
    S, standard, flash = np.zeros((64, 64)), np.zeros((64, 32)), np.zeros((64, 32))
    attention_one_head(Q, K, V, S, standard, 64, 64)
    flash_one_head(Q, K, V, flash, 16, 16)
    c = 16  # equal scores and values of 1: each block's o is 1, and so is that of all blocks together
    most = np.abs(standard - flash).max()
    return f"""Max difference: {most:.2e}   (one head in numpy, n = 64, tiles of 16 x 16)
  The recurrence in the source's docstring divides by l at each step but forgets the l before: of two blocks
  of {c} values of 1 it makes {(1 + c * 1) / (2 * c):.2f}. Its code divides once, at the end, and is right."""


# %% 3. Batched, with masks, and the backward pass by hand
def unseen(I: slice, J: slice, offset: int, device=None):
    """(rows, columns) bool: which keys come after a query. The last query is level with the last key.

    So a single query, as in decoding, sees every key, and of more queries than keys the first see none. (The
    library's `is_causal=True` aligns the first with the first.) offset: n_k - n_q.
    """
    i, j = (torch.arange(x.start, x.stop, device=device) for x in (I, J))
    return j > i[:, None] + offset


def naive(q, k, v, causal: bool = False, keep=None):
    """The obvious way: softmax(q k^T / sqrt(d)) v, with the shapes and masks of `flash_attention`."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    s = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, h, n_q, n_k)
    if causal:
        s = s.masked_fill(unseen(slice(0, n_q), slice(0, n_k), n_k - n_q, q.device), -math.inf)
    if keep is None and not (causal and n_q > n_k):
        return s.softmax(-1) @ v
    if keep is not None:
        s = s.masked_fill(~keep[:, None, None], -math.inf)
    # A row of -inf alone has no softmax: its NaN, hidden afterwards, would come back in the gradients.
    empty = (s == -math.inf).all(-1, keepdim=True)
    return s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v


def tiles(n_q: int, n_k: int, causal: bool, rows: int, columns: int):
    """(I, [J, ...]) for each block of rows I: the blocks of columns that some row of it sees."""
    for i in range(0, n_q, rows):
        I = slice(i, min(i + rows, n_q))
        end = min(n_k, I.stop + n_k - n_q) if causal else n_k
        yield I, [slice(j, min(j + columns, end)) for j in range(0, end, columns)]


def scores(q, k, I: slice, J: slice, offset: int | None, keep):
    """A tile (B, h, rows, columns); -inf where a query must not look. offset is None if not causal."""
    s = q @ k.mT
    if offset is not None and J.stop - 1 > I.start + offset:  # else its first row sees its last column
        s.masked_fill_(unseen(I, J, offset, s.device), -math.inf)
    if keep is not None:
        s.masked_fill_(~keep[:, None, None, J], -math.inf)
    return s


def without_autocast(function):
    """Autocast would make 16 bit of scores and sums."""

    @functools.wraps(function)
    def wrapped(ctx, x, *others):
        with torch.autocast(x.device.type, enabled=False):
            return function(ctx, x, *others)

    return wrapped


class Flash(torch.autograd.Function):
    """(o, log-sum-exp) of attention in tiles; to go back it makes the tiles again."""

    @staticmethod
    @without_autocast
    def forward(ctx, q, k, v, causal, keep, rows, columns):
        n_q, n_k, scale = q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5
        offset = n_k - n_q if causal else None
        exact = torch.promote_types(q.dtype, torch.float32)  # 16 bit hold neither scores nor sums
        o = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=exact)
        for I, Js in tiles(n_q, n_k, causal, rows, columns):
            q_i = q[..., I, :].to(exact) * scale
            m = torch.full_like(q_i[..., :1], -math.inf)
            l = torch.zeros_like(m)
            o_i = torch.zeros_like(o[..., I, :], dtype=exact)
            for J in Js:
                k_j, v_j = k[..., J, :].to(exact), v[..., J, :].to(exact)
                s = scores(q_i, k_j, I, J, offset, keep)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                shift = m_new.masked_fill(m_new == -math.inf, 0)  # nothing seen yet: -inf - -inf is NaN
                p = s.sub_(shift).exp_()
                decay = (m - shift).exp_()
                l = l * decay + p.sum(-1, keepdim=True)
                o_i.mul_(decay).add_(p @ v_j)
                m = m_new
            o[..., I, :] = o_i / l.masked_fill(l == 0, 1)  # a row that saw nothing gives 0
            lse[..., I] = (m + l.log())[..., 0]  # and -inf
        ctx.save_for_backward(q, k, v, o, lse, keep)
        ctx.how = causal, rows, columns
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx, do, _):
        # FlashAttention-2, algorithm 2, with the loops as in the forward pass. Q holds the 1 / sqrt(d) of
        # S = Q K^T; P = e^(S - lse):
        #   dV = P^T dO    dP = dO V^T    dS = P (dP - row sums of dO O)    dQ = dS K    dK = dS^T Q
        q, k, v, o, lse, keep = ctx.saved_tensors
        causal, rows, columns = ctx.how
        n_q, n_k, scale, exact = q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5, lse.dtype
        offset = n_k - n_q if causal else None
        dq, dk, dv = (torch.zeros_like(x, dtype=exact) for x in (q, k, v))
        lse = lse.masked_fill(lse == -math.inf, 0)[..., None]  # P of a row that saw nothing: e^(-inf - 0) = 0
        for I, Js in tiles(n_q, n_k, causal, rows, columns):
            q_i, do_i = q[..., I, :].to(exact) * scale, do[..., I, :].to(exact)
            inner = (do_i * o[..., I, :]).sum(-1, keepdim=True)
            for J in Js:
                k_j, v_j = k[..., J, :].to(exact), v[..., J, :].to(exact)
                p = scores(q_i, k_j, I, J, offset, keep).sub_(lse[..., I, :]).exp_()
                dv[..., J, :] += p.mT @ do_i
                ds = (do_i @ v_j.mT).sub_(inner).mul_(p)
                dq[..., I, :] += ds @ k_j
                dk[..., J, :] += ds.mT @ q_i
            dq[..., I, :] *= scale
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def flash_attention(q, k, v, causal=False, keep=None, rows: int = ROWS, columns: int = COLUMNS):
    """(o (B, h, n_q, d_v), log-sum-exp (B, h, n_q) in at least float32) without n_q x n_k of anything.

    q (B, h, n_q, d), k (B, h, n_k, d), v (B, h, n_k, d_v), keep (B, n_k) bool, False for keys to pass over.
    A query that sees no key gives o = 0, log-sum-exp -inf, gradient 0. Raises ValueError for shapes or dtypes
    that do not match.
    """
    right = q.ndim == k.ndim == v.ndim == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if not (right and q.shape[3] == k.shape[3] > 0 and k.shape[2] == v.shape[2]):
        raise ValueError(f"shapes do not match: q {(*q.shape,)}, k {(*k.shape,)}, v {(*v.shape,)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"not of one floating dtype: q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if keep is not None and (keep.dtype, keep.shape) != (torch.bool, k.shape[:3:2]):
        raise ValueError(f"keep must be bool (B, n_k), is {keep.dtype} {(*keep.shape,)}")
    if min(rows, columns) < 1:
        raise ValueError(f"a tile of {rows} x {columns}")
    return Flash.apply(q, k, v, causal, keep, rows, columns)


# %% 4. The check: against float64, beside the library
def library(q, k, v, causal: bool = False):
    """The kernel that people use, masked as here."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    if not causal or n_q == n_k:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    seen = ~unseen(slice(0, n_q), slice(0, n_k), n_k - n_q, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def tiled(q, k, v, causal: bool = False):
    """The output of `flash_attention` alone."""
    return flash_attention(q, k, v, causal)[0]


def results_of(attention, inputs, causal: bool, dtype) -> list:
    """[o, dq, dk, dv] in float64, from inputs (q, k, v, do) rounded to dtype."""
    q, k, v, do = (x.to(dtype).requires_grad_() for x in inputs)
    o = attention(q, k, v, causal)
    return [x.detach().double() for x in (o, *torch.autograd.grad(o, (q, k, v), do))]


def check(n_q: int, n_k: int, device) -> Table:
    """Outputs and gradients in float32 and bf16, and what no average over inputs would show."""
    full = [torch.randn(2, 4, n, 40, device=device) for n in (n_q, n_k, n_k, n_q)]
    rows, wrong = [], []
    for dtype in (torch.float32, torch.bfloat16):
        name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
        inputs = [x.to(dtype).double() for x in full]
        exact, *tried = (
            results_of(attention, inputs, True, t)
            for attention, t in ((naive, torch.float64), (tiled, dtype), (library, dtype), (naive, dtype))
        )
        for x, right, *others in zip(("o", "dq", "dk", "dv"), exact, *tried, strict=True):
            errors = [(right - other).abs().max().item() for other in others]
            # float32: many roundings, which hardly ever line up. bf16: the output's own, by eps / 2;
            # gradients start from an output that is already rounded.
            roundings = 32 if dtype == torch.float32 else 1.01 if x == "o" else 2
            bound = roundings * eps / 2 * right.abs().max().item()
            rows.append((f"{name}, {x}", *errors, bound))
            if not errors[0] <= bound:
                wrong.append(f"{name} {x} is off by {errors[0]:.1e}, allowed is {bound:.1e}")
    q, k, v, _ = (x.double() for x in full)
    small = [x[:1, :1, :7, :3].clone().requires_grad_() for x in (q, k, v)]
    torch.autograd.gradcheck(lambda *x: flash_attention(*x, True, None, 3, 2)[0], small)
    (o, lse), blind = flash_attention(q, k[..., :5, :], v[..., :5, :], causal=True), slice(0, n_q - 5)
    if o[:, :, blind].any() or not (lse[..., blind] == -math.inf).all() or not o.isfinite().all():
        wrong.append("a query that sees no key gives something")
    last = q[..., -1:, :]
    if not torch.allclose(tiled(last, k, v, True), naive(last, k, v), rtol=1e-12, atol=1e-12):
        wrong.append("a single query does not see every key")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    title = f"largest difference to float64, {n_q} queries and {n_k} keys, causal:"
    notes = """bound: of the largest value 16 eps in float32, in bf16 eps / 2 for o and eps for gradients,
as the tiles compute in 32 bit what comes in 16.
In float64 gradcheck passes. With 5 keys the queries before the last 5 see none: o = 0, log-sum-exp = -inf.
A single query sees every key."""
    return Table(title, "|by hand|library|obvious way|bound", "|.1e|.1e|.1e|.1e", rows, notes)


# %% 5. Traffic: bytes through a fast memory
class Slow:
    """An array in slow memory, which counts the bytes that are read from it and written to it."""

    def __init__(self, array):
        self.array, self.shape, self.bytes = array, array.shape, 0

    def __len__(self):
        return len(self.array)

    def __getitem__(self, where):
        self.bytes += self.array[where].nbytes
        return self.array[where].copy()

    def __setitem__(self, where, block):
        self.array[where] = block
        self.bytes += self.array[where].nbytes


def block_sizes(M: int, d: int, flash: bool) -> tuple[int, int]:
    """(rows, columns) of a tile of scores that fits M numbers with its q and k and, in flash, v, o, m, l.

    Many rows save traffic, as all keys pass by once for each block of them; so keys get little room.
    """
    columns = max(1, M // (16 * d))
    per_row, per_column = (2 * d + 2, 2 * d) if flash else (d, d)
    return (M - columns * per_column) // (per_row + columns), columns


def traffic(n: int, d: int, M: int, flash: bool) -> int:
    """Numbers moved to and from slow memory, by formula, for one head with n queries and n keys."""
    passes = math.ceil(n / block_sizes(M, d, flash)[0])  # of the keys, of the values
    return n * d * (2 + 2 * passes) + (0 if flash else 4 * n * n)  # S written, read, P written, read


def counted_traffic(n: int, d: int, M: int, flash: bool, seed: int) -> int:
    """The same in bytes, counted while the code of section 2 computes with float32."""
    arrays = np.random.default_rng(seed).standard_normal((3, n, d), dtype=np.float32)
    S, O = (np.zeros((n, width), np.float32) for width in (n, d))
    Q, K, V, S, O = map(Slow, (*arrays, S, O))
    attention, between = (flash_one_head, ()) if flash else (attention_one_head, (S,))
    attention(Q, K, V, *between, O, *block_sizes(M, d, flash))
    right = naive(*torch.from_numpy(arrays)[:, None, None]).numpy()[0, 0]
    if not np.allclose(O.array, right, rtol=1e-4, atol=1e-5):
        raise CheckFailed(f"attention through {M} numbers of fast memory differs from attention")
    return sum(x.bytes for x in (Q, K, V, S, O))


def traffic_table(n: int, d: int, kib, seed: int) -> Table:
    """Counted for sizes of fast memory in KiB of float32, beside n d + n^2 and n^2 d^2 / M."""
    rows = []
    for size in kib:
        M = 1024 * size // 4
        counted = [counted_traffic(n, d, M, flash, seed) for flash in (False, True)]
        predicted = [4 * traffic(n, d, M, flash) for flash in (False, True)]
        if counted != predicted:
            raise CheckFailed(f"{size} KiB: counted {counted} bytes, by the formula {predicted}")
        a, b = counted
        orders = a / (4 * (n * d + n * n)), b / (4 * n * n * d * d / M)
        rows.append(
            (f"{size} KiB", block_sizes(M, d, True)[0], a / 1e6, orders[0], b / 1e6, orders[1], a / b)
        )

    def gain(n, M):
        return traffic(n, d, M, False) / traffic(n, d, M, True)

    least = next(M for M in range(16 * d, 10**9, 16) if gain(n, M) > 1)
    few, gained = block_sizes(least, d, True)[0], gain(d // 4, SHARED // 4)
    kib, law, short = least / 256, "n^2 d^2 / M", d // 4
    notes = f"""Counted as by formula. Tiles do not pay below {kib:.1f} KiB, {few} rows, and hardly for short
sequences: {gained:.2f} times fewer bytes for n = {short}. Where M nears n d, that is what is left, not {law}.
A GPU's fast memory is an SM's shared memory (227 KiB on an H100) and registers, not the L2 cache."""
    head = "fast memory|rows|three passes, MB|/ (n d + n^2)|tiles, MB|/ (n^2 d^2 / M)|times fewer"
    title = f"bytes counted, one head, n = {n:,}, d = {d}, float32:"
    return Table(title, head, "||.1f|.1f|.1f|.1f|.1f", rows, notes)


# %% 6. The same tiles as a kernel
if triton:

    @triton.jit
    def flash_kernel(
        Q, K, V, O, LSE, n_q, n_k, d, scale,
        causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """One program a block of rows and head: its queries, o, m and l stay in registers."""
        head = tl.program_id(1).to(tl.int64)
        i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        f = tl.arange(0, WIDTH)  # d, up to the next power of two
        at = (head * n_q + i[:, None]) * d + f
        q = tl.load(Q + at, mask=(i[:, None] < n_q) & (f < d), other=0.0)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, WIDTH], tl.float32)
        end = n_k
        if causal:
            end = tl.minimum(n_k, (tl.program_id(0) + 1) * ROWS + n_k - n_q)
        for start in range(0, end, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            there = (head * n_k + j[:, None]) * d + f
            inside = (j[:, None] < n_k) & (f < d)
            k = tl.load(K + there, mask=inside, other=0.0)
            v = tl.load(V + there, mask=inside, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = j[None, :] < n_k
            if causal:
                seen = seen & (j[None, :] <= i[:, None] + n_k - n_q)
            s = tl.where(seen, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp(s - shift[:, None])
            decay = tl.exp(m - shift)
            l = l * decay + tl.sum(p, 1)
            o = o * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = m_new
        o = o / tl.where(l == 0.0, 1.0, l)[:, None]
        tl.store(O + at, o.to(O.dtype.element_ty), mask=(i[:, None] < n_q) & (f < d))
        tl.store(LSE + head * n_q + i, m + tl.log(l), mask=i < n_q)


def flash_triton(q, k, v, causal: bool = False, rows: int = 64, columns: int = 64):
    """(o, log-sum-exp in float32) from one kernel; q (B, h, n_q, d), k and v (B, h, n_k, d). No gradient.

    In an interpreter on the CPU if TRITON_INTERPRET=1 is set before this file is imported.
    """
    q, k, v = (x.contiguous() for x in (q, k, v))
    (B, h, n_q, d), n_k = q.shape, k.shape[2]
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    grid = (triton.cdiv(n_q, rows), B * h)
    sizes = {"ROWS": rows, "COLUMNS": columns, "WIDTH": max(16, triton.next_power_of_2(d))}
    flash_kernel[grid](q, k, v, o, lse, n_q, n_k, d, d**-0.5, causal=causal, **sizes)
    return o, lse


# %% 7. Measured: time and peak memory
VERSIONS = {"obvious way": naive, "tiles": tiled, "library": library}
KEPT = "obvious way, memory kept"


def inputs_for(n: int, device) -> list:
    """q, k, v and the gradient of o, (1, 8, n, 64): float32 on a CPU, bf16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(1, HEADS, n, WIDTH, device=device, dtype=dtype) for _ in range(4)]


def forward(attention, q, k, v, do):
    with torch.no_grad():
        attention(q, k, v, True)


def forward_backward(attention, q, k, v, do):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    torch.autograd.grad(attention(q, k, v, True), (q, k, v), do)


MODES = {"forward": forward, "forward + backward": forward_backward}


def versions_for(device) -> tuple[dict, str]:
    """(what to measure, what became of Triton). On a GPU the library's other kernels and ours come along."""
    if device.type != "cuda":
        why = "installed, but without a GPU it has only its interpreter" if triton else "not installed"
        return VERSIONS, f"Triton kernel skipped: {why}."
    found = dict(VERSIONS)
    q, k, v, _ = inputs_for(1000, device)
    for name, backend in KERNELS.items():

        def kernel(q, k, v, causal, backend=backend):
            with sdpa_kernel(backend):
                return library(q, k, v, causal)

        try:
            kernel(q, k, v, True)
            found[name] = kernel
        except RuntimeError:  # not for this GPU, or not in this build
            pass
    if not triton:
        return found, "Triton kernel skipped: not installed."
    found["triton"] = lambda q, k, v, causal: flash_triton(q, k, v, causal)[0]
    right = naive(*(x.double() for x in (q, k, v)), True)
    error = (found["triton"](q, k, v, True) - right).abs().max()
    if not error < 0.02:
        raise CheckFailed(f"the Triton kernel is off by {error:.1e}, allowed is 0.02 in bf16")
    return found, f"Triton kernel: forward only, differs from float64 by {error:.1e}."


def predicted_peak(name: str, mode: str, n: int, s: int) -> int:
    """Bytes that must be there at once on top of the inputs, of s a number.

    The obvious way: o, the mask, scores before and after it; later P, its gradient and that of the scores.
    Others: o, log-sum-exp, later dq, dk, dv. Tiles: two of scores, the last and the next, later three; in
    float32 a block of q, of o and of p v.
    """
    back = mode != "forward"
    if name == "obvious way":
        return HEADS * n * (WIDTH + n * (3 if back else 2)) * s + n * n
    rows, columns = (min(n, ROWS), min(n, COLUMNS)) if name == "tiles" else (0, 0)
    inside = 4 * HEADS * rows * ((3 if back else 2) * columns + 3 * WIDTH)
    return HEADS * n * (WIDTH * (s + (3 * 4 if back else 0)) + 4) + inside


def memory(device, field: str) -> int:
    """Bytes in use now (field VmRSS) or at most since the last call with VmRSS (VmHWM)."""
    if device.type == "cuda":
        if field == "VmHWM":
            return torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        if sys.platform == "win32":
            return 0
        import resource  # macOS: bytes, at most since the process began

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if field == "VmRSS":
        with contextlib.suppress(OSError):
            reset.write_text("5")
    found = re.search(rf"{field}:\s*(\d+)", status.read_text())
    return 1024 * int(found[1]) if found else 0


def measure_point(attention, n: int, modes: list[str], seed: int, device) -> dict:
    """{mode: (seconds, peak bytes on top of the inputs)}.

    After a forward pass of warm-up: the median of 3 to 15 calls, or a single call that takes over a second.
    """
    torch.manual_seed(seed)
    inputs, found = inputs_for(n, device), {}
    for mode in modes:
        MODES[mode](attention, *inputs_for(64, device))  # what libraries allocate once
    before = memory(device, "VmRSS")
    forward(attention, *inputs)
    for mode in modes:
        call = partial(MODES[mode], attention, *inputs)
        seconds = common.measure(call, device, repeats=1, warm_up=0)
        peak = memory(device, "VmHWM") - before or None  # where it cannot be read
        if seconds < 1:
            seconds = common.measure(call, device, max(3, min(15, int(0.5 / seconds))), warm_up=0)
        found[mode] = seconds, peak
    return found


def in_its_own_process(name: str, n: int, modes: list[str], seed: int, path: Path) -> None:
    torch.set_num_threads(common.usable_cpus())
    path.write_text(json.dumps(measure_point(VERSIONS[name], n, modes, seed, torch.device("cpu"))))


def start_process(name: str, n: int, modes: list[str], seed: int, largest: int = 2**25) -> dict:
    """`measure_point` in a process whose allocator keeps what is freed, up to `largest` bytes a piece.

    Larger pieces go back to the system, and come anew by a page fault every 4 kB: glibc's way from 32 MiB on.
    """
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(largest), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "point.json"
        common.run_processes(in_its_own_process, {f"{name}, n = {n}": (name, n, modes, seed, path)})
        return json.loads(path.read_text())


def measure_all(sizes, versions: dict, seed: int, device, bar) -> tuple[dict, list[str]]:
    """({(name, mode, n): (seconds, peak)}, why some are missing). On a CPU each point has its own process."""
    found, missing, s = {}, [], 2 if device.type == "cuda" else 4
    for n, (name, attention) in itertools.product(sizes, versions.items()):
        modes, free = [], common.usable_memory(device) // 2
        for mode in MODES if name != "triton" else ("forward",):
            need = predicted_peak(name, mode, n, s)
            if need > free:
                why = f"takes {need / 1e9:.1f} GB, half of what is free is {free / 1e9:.1f}"
                missing.append(f"{name}, {mode}, n = {n:,}: {why}")
            else:
                modes.append(mode)
        bar.update()
        if not modes:
            continue
        if device.type == "cuda":
            points = measure_point(attention, n, modes, seed, device)
        else:
            points = start_process(name, n, modes, seed)
        found |= {(name, mode, n): point for mode, point in points.items()}
    n = sizes[-2:][0]
    if device.type == "cpu" and len(sizes) > 1 and ("obvious way", "forward", n) in found:
        found[KEPT, "forward", n] = start_process("obvious way", n, ["forward"], seed, 2**34)["forward"]
    return found, missing


def time_notes(sizes, found: dict) -> dict[str, str]:
    """What the two tables of times say, by mode."""
    obvious, fast = (
        {(mode, n): found[name, mode, n][0] for mode in MODES for n in sizes if (name, mode, n) in found}
        for name in ("obvious way", "tiles")
    )
    both = [n for n in sizes if ("forward + backward", n) in obvious.keys() & fast.keys()]
    notes = dict.fromkeys(MODES, "")
    if both:
        n, gains = both[-1], [obvious["forward", n] / fast["forward", n] for n in both]
        a, b = (times["forward + backward", n] / times["forward", n] for times in (obvious, fast))
        here = " to ".join(f"{gain:.1f}" for gain in dict.fromkeys((min(gains), max(gains))))
        first = f"""The sources say 4-8x, 2.4x, 4.1x. It depends on n and the machine: here {here}.
Up to twofold it is the mask: tiles leave out what it hides."""
        second = f"""Both passes have 3 times the matmuls of forward alone, 2 + 4 to 2; in tiles, which make
the scores again, 3.5 times, 2 + 5 to 2. At n = {n:,} they took {a:.1f} and {b:.1f} times as long."""
        notes = dict(zip(MODES, (first, second), strict=True))
    for (name, _, n), (seconds, _) in found.items():
        if name == KEPT and seconds < 0.8 * obvious["forward", n]:  # not all allocators listen
            notes["forward"] += f"""
The obvious way gets much of its memory from the system anew, page by page. In a process that keeps it,
n = {n:,} takes {1e3 * seconds:.1f} ms: {seconds / fast["forward", n]:.1f} times as long as tiles."""
    return notes


def time_tables(sizes, names: list[str], found: dict) -> list[Table]:
    """Milliseconds, and how many times as long the obvious way takes as tiles, tiles as the library."""
    tables, notes = [], time_notes(sizes, found)
    for mode in MODES:
        rows = []
        for n in sizes:
            a, b, c, *others = (found.get((name, mode, n), [None])[0] for name in names)
            row = [t and 1e3 * t for t in (a, b, c, *others)]
            rows.append((f"{n:,}", *row, a and b and a / b, b and c and b / c))
        head = "|".join(["n", *names, "obvious way / tiles", "tiles / library"])
        formats = "|" + ",.1f|" * len(names) + ".1f|.2f"
        tables.append(Table(f"{mode}, ms:", head, formats, rows, notes[mode]))
    return tables


def memory_table(sizes, found: dict, s: int, notes: str) -> Table:
    """Peaks beside what must be there at once."""
    rows = []
    for mode, n in itertools.product(MODES, sizes):
        cells, (a, b, c) = [], (found.get((name, mode, n), [0, None])[1] for name in VERSIONS)
        for name, peak in ("obvious way", a), ("tiles", b):
            expected = predicted_peak(name, mode, n, s)
            cells += [peak and peak / 1e6, expected / 1e6, peak and peak / expected]
        rows.append((f"{mode}, {n:,}", *cells, c and c / 1e6, a and b and a / b))
    head = "n|obvious way|predicted|ratio|tiles|predicted|ratio|library|obvious way / tiles"
    formats = "|,.1f|,.1f|.2f|,.1f|,.1f|.2f|,.1f|.0f"
    notes = f"predicted: what must be there at once; besides, the allocator keeps pieces.\n{notes}"
    return Table("peak memory on top of the inputs, MB:", head, formats, rows, notes)


def draw(sizes, names: list[str], found: dict):
    """Time and peak memory of a training step against n, on log-log axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    panels = ("time of forward + backward", "ms", 1e3), ("peak memory on top of the inputs", "MB", 1e-6)
    for i, (axes, (title, unit, factor)) in enumerate(zip(figure.subplots(1, 2), panels, strict=True)):
        for name in names:
            points = [found.get((name, "forward + backward", n), (None, None))[i] for n in sizes]
            values = [math.nan if value is None else factor * value for value in points]
            axes.plot(sizes, values, "o-", label=name)
        axes.set(title=title, ylabel=unit, xlabel="tokens n", xscale="log", yscale="log")
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    return figure


def main():
    parser = common.Parser(__doc__)
    args = parser.parse_args()
    device, threads = common.choose_device(args.device), common.usable_cpus()
    common.writable(args.out)
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    common.set_precision("fp32", device)
    precision = "bf16" if device.type == "cuda" else "fp32"
    print(common.header(device, precision, "where no other is named", threads, args.seed), flush=True)

    checked = check(*((40, 57) if args.quick else (193, 250)), device)
    kib = (8, 32, 227) if args.quick else (4, 8, 16, 32, 64, 128, 227, 1024)
    moved = traffic_table(256 if args.quick else 1024, WIDTH, kib, args.seed)
    versions, told = versions_for(device)
    sizes, names = QUICK_SIZES if args.quick else SIZES, list(versions)
    with tqdm(total=len(sizes) * len(versions), desc="measuring", unit=" points", leave=False) as bar:
        found, missing = measure_all(sizes, versions, args.seed, device, bar)
    tables = [problem_table(), checked, moved, *time_tables(sizes, names, found)]
    tables.append(memory_table(sizes, found, 2 if precision == "bf16" else 4, "\n".join([*missing, told])))
    said = source_lines(args.seed)
    common.save_results(args, device, {"source": said.splitlines()}, tables)
    common.save_figure(args.out / f"{NAME}.png", draw(sizes, names, found))
    for part in (tables[0], said, checked, *tables[2:]):
        print(f"\n{part}")


if __name__ == "__main__":
    common.run(main)

# Left out: dropout, sliding windows, grouped queries; warps, asynchronous copies and what else makes a kernel
# fast; the split over keys that decoding needs when there is one query and many keys.
# Exercise: exchange the loops, as the first FlashAttention did. What moves then that did not, and how much?
# Next: 05_mixed_precision.py asks how few bits all of this needs.
