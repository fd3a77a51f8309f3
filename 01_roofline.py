# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy>=1.26", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""When does a chip wait for its memory, and when does the memory wait for the chip?

An operation does FLOPs and moves bytes. Their ratio, its arithmetic intensity, decides which takes longer;
at the ridge of a chip both take the same time. You will see
  - why matmuls are cut into tiles: b x b tiles of s-byte numbers do b / s FLOPs for each byte loaded;
  - the ridge of four GPUs from their data sheets, and that of this machine from measurements;
  - matmuls too small to keep the cores busy, and bandwidth that falls from cache to cache down to DRAM;
  - a transformer under these roofs: prefill is compute-bound, decode memory-bound until the batch is large;
  - what it saves to fuse a chain of elementwise operations.

    python 01_roofline.py                under a minute and 3 GB on two cores
    python 01_roofline.py --quick        the same in miniature, about ten seconds
    python 01_roofline.py --gpu-specs    with the data-sheet roofs of the GPUs in the picture

Notation (example)
    n  side of a matrix (2048)         B  sequences in a batch (64)     s  bytes of a number: fp32 4, bf16 2
    b  side of a tile (128)            T  tokens in a sequence (256)    d, h  width, heads (2048, 16)
"""

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import BadInput, CheckFailed, Table

NAME = Path(__file__).stem
SIZES = (32, 128, 512, 2048)  # n of the matmuls
FLOATS = (*(2**k for k in range(10, 26, 2)), 32_000_000)  # lengths of the arrays that are streamed
BATCHES = (1, 4, 16, 64, 256)  # sequences that decode one token each
BLOCK = 2**18  # float32 numbers, 1 MB: two such blocks stay in a cache
TOLERANCE = 0.1  # medians of the same work differ by less; a point further above a roof is a fault

# Dense TFLOP/s and TB/s of NVIDIA's data sheets: A100 80GB, H100, H200 as SXM modules, B200 in an HGX board.
# None: an A100 has no FP8; sources differ on the FP32 and TF32 of a B200. gemm: the best bf16 matmul measured
# for "Machine Learning Engineering" (S. Bekman), TFLOP/s.
GPUS = {
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp8": None, "memory": 2.039, "gemm": 271},
    "H100": {"fp32": 67, "tf32": 494.7, "bf16": 989, "fp8": 1979, "memory": 3.35, "gemm": 794.5},
    "H200": {"fp32": 67, "tf32": 494.7, "bf16": 989, "fp8": 1979, "memory": 4.8, "gemm": None},
    "B200": {"fp32": None, "tf32": None, "bf16": 2250, "fp8": 4500, "memory": 8.0, "gemm": 1745},
}
TOGETHER = (11 * 128, 12 * 128)  # 11 x 12 tiles of 128: one for each of an H100's 132 SMs
# dtype, and the speed of matmuls relative to fp32 if the number of bits alone decided
PRECISIONS = {
    "fp64": (torch.float64, 0.5),
    "fp32": (torch.float32, 1),
    "tf32": (torch.float32, 2),  # on a CPU: float32 matmuls whose inputs are rounded to bf16
    "bf16": (torch.bfloat16, 2),
    "fp16": (torch.float16, 2),
}


# %% 1. The arithmetic: FLOPs and bytes
@dataclass(frozen=True)
class Work:
    """FLOPs, and the bytes that must move at the least: each input read once, each output written once."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.bytes


def matmul(m: int, k: int, n: int, s: int) -> Work:
    """(m, k) @ (k, n): m n dot products of k multiply-adds."""
    return Work(2 * m * k * n, s * (m * k + k * n + m * n))


def elementwise(numbers: int, s: int, inputs: int = 1) -> Work:
    """One FLOP on each number of `inputs` arrays, into one array."""
    return Work(numbers, s * (inputs + 1) * numbers)


def layer_norm(rows: int, d: int, s: int) -> Work:
    """8 d a row: mean d, variance 3 d (subtract, square, add), normalise 2 d, scale and shift 2 d."""
    return Work(8 * rows * d, s * (2 * rows * d + 2 * d))


def softmax(rows: int, n: int, s: int) -> Work:
    """5 n a row: maximum, subtract, exponentiate, add up, divide."""
    return Work(5 * rows * n, s * 2 * rows * n)


def attention_decode(B: int, T: int, d: int, h: int, s: int) -> Work:
    """One new token in each of B sequences looks at T keys and values of its own; scores stay on the chip."""
    return Work(4 * B * T * d + softmax(B * h, T, s).flops, s * (2 * B * T * d + 2 * B * d))


def attention_prefill(T: int, d: int, h: int, s: int) -> Work:
    """T tokens look at themselves and those before, T (T + 1) / 2 pairs; scores stay on the chip."""
    pairs = T * (T + 1) // 2
    return Work(pairs * (4 * d + 5 * h), s * 4 * T * d)


def mlp(tokens: int, d: int, s: int) -> Work:
    """d to 4 d, GELU (taken as one FLOP), back to d: three kernels, so what is 4 d wide moves four times."""
    up, down = matmul(tokens, d, 4 * d, s), matmul(tokens, 4 * d, d, s)
    gelu = elementwise(tokens * 4 * d, s)
    return Work(up.flops + gelu.flops + down.flops, up.bytes + gelu.bytes + down.bytes)


def ridge(gpu: str) -> float:
    """FLOP/byte at which bf16 arithmetic takes as long as memory: 989e12 / 3.35e12 = 295 for an H100."""
    return GPUS[gpu]["bf16"] / GPUS[gpu]["memory"]


# %% 2. Tiles: why a large matmul is not memory-bound
def tile_intensity(rows: int, columns: int, s: int) -> float:
    """FLOP/byte of an output tile that loads rows x K and K x columns numbers; b / s where both are b."""
    return 2 * rows * columns / (s * (rows + columns))


def tiled_bytes(m: int, k: int, n: int, b: int, s: int) -> int:
    """Of (m, k) @ (k, n): A once for each column of tiles, B once for each row of tiles, and C once."""
    return s * (m * k * math.ceil(n / b) + k * n * math.ceil(m / b) + m * n)


def tiled_matmul(A: np.ndarray, B: np.ndarray, b: int) -> tuple[np.ndarray, int]:
    """(A @ B, bytes loaded and stored): each b x b tile of the output from its own strips of A and B."""
    C, moved = np.empty((A.shape[0], B.shape[1]), A.dtype), 0
    for i in range(0, A.shape[0], b):
        for j in range(0, B.shape[1], b):
            strip_a, strip_b = A[i : i + b], B[:, j : j + b]  # (b, k), (k, b); less at the edges
            C[i : i + b, j : j + b] = tile = strip_a @ strip_b
            moved += strip_a.nbytes + strip_b.nbytes + tile.nbytes
    return C, moved


def count_tiles(n: int, tiles, seed: int) -> list[tuple]:
    """Multiply in tiles, count bytes, compare both with what they should be. Raises CheckFailed."""
    A, B = np.random.default_rng(seed).standard_normal((2, n, n), dtype=np.float32)
    exact, rows = A.astype(np.float64) @ B, []
    bound = n * np.finfo(np.float32).eps * np.abs(A) @ np.abs(B)  # n roundings, whatever their order
    for b in tiles:
        C, counted = tiled_matmul(A, B, b)
        if counted != (formula := tiled_bytes(n, n, n, b, 4)) or not (np.abs(C - exact) <= bound).all():
            raise CheckFailed(f"tiles of {b}: {counted} bytes, expected {formula}, or a wrong product")
        rows.append((n, b, counted, formula, 2 * n**3 / counted))
    return rows


# %% 3. The roofs of this machine
@dataclass(frozen=True)
class Point:
    """An operation and the median seconds of a call."""

    group: str
    name: str
    work: Work
    call: Callable
    precision: str = "fp32"
    footprint: int = 0  # bytes of memory in use, where not those that move: what a cache must hold
    seconds: float = math.nan

    @property
    def size(self) -> int:
        """Bytes that a cache must hold to serve it."""
        return self.footprint or self.work.bytes

    @property
    def rates(self) -> tuple[float, float]:
        """FLOP/s, B/s."""
        return self.work.flops / self.seconds, self.work.bytes / self.seconds

    def measured(self, device: torch.device, budget: float) -> "Point":
        """The same, timed: calls for about `budget` seconds, but at least 5."""
        common.set_precision(self.precision, device)
        once = common.measure(self.call, device, repeats=1)
        return replace(self, seconds=common.measure(self.call, device, max(5, min(500, int(budget / once)))))


@dataclass(frozen=True)
class Roofs:
    """What the measured matmuls and streams reached: the roofs over everything else. Williams et al. 2009."""

    points: list[Point]

    def peak(self, precision: str) -> float:
        """FLOP/s of the best matmul."""
        return max(p.rates[0] for p in self.points if (p.group, p.precision) == ("matmul", precision))

    def bandwidth(self, working_set: float = math.inf) -> float:
        """B/s: the best stream of at least half so many bytes, as a smaller set is never further away."""
        streams = [p for p in self.points if p.group == "stream"]
        dram = min(p.size for p in streams[-3:])  # read, in place and add of the longest arrays
        return max(p.rates[1] for p in streams if p.size >= min(working_set / 2, dram))

    def ridge(self, precision: str) -> float:
        """FLOP/byte, with the bandwidth of the largest arrays: DRAM's."""
        return self.peak(precision) / self.bandwidth()

    def terms(self, point: Point) -> tuple[float, float]:
        """Seconds of computing at the peak and of moving at the bandwidth of so many bytes."""
        work, bandwidth = point.work, self.bandwidth(point.size)
        return work.flops / self.peak(point.precision), work.bytes / bandwidth

    def least(self, point: Point) -> float:
        """Seconds that it takes at the least: the longer of the two."""
        return max(self.terms(point))

    def above(self, points: list[Point]) -> list[Point]:
        """Those faster than their roof allows."""
        return [p for p in points if not p.seconds * (1 + TOLERANCE) >= self.least(p)]


def matmuls(precision: str, sizes, device: torch.device) -> list[Point]:
    """Products of random n x n matrices, into one that is ready."""
    dtype, points = PRECISIONS[precision][0], []
    for n in sizes:
        a, b = torch.randn(2, n, n, device=device).to(dtype)
        call = partial(torch.mm, a, b, out=torch.empty_like(a))
        points.append(Point("matmul", f"n={n}", matmul(n, n, n, a.element_size()), call, precision))
    return points


def speed_ratio(precision: str, device: torch.device) -> float:
    """Of small matmuls, to fp32: without units for it, bf16 can be 500 times slower than fp32."""
    n = 256 if device.type == "cpu" else 4096
    fp32, other = (matmuls(p, (n,), device)[0].measured(device, 0.05) for p in ("fp32", precision))
    return fp32.seconds / other.seconds


def streams(lengths, device: torch.device) -> list[Point]:
    """Read, change in place and add float32 arrays of each length; last the source's add, to a new array."""
    x, y, z = (torch.empty(lengths[-1], device=device).uniform_(0.5, 1.5) for _ in range(3))
    points, total = [], torch.empty((), device=device)
    for n in lengths:
        a, b, c = x[:n], y[:n], z[:n]
        points += [
            Point("stream", "read", Work(n, 4 * n), partial(torch.sum, a, dim=0, out=total)),
            Point("stream", "in place", elementwise(n, 4), a.neg_, footprint=4 * n),
            Point("stream", "add", elementwise(n, 4, inputs=2), partial(torch.add, a, b, out=c)),
        ]
    return [*points, Point("source", "x + y", points[-1].work, lambda: x + y)]


def page_faults(call) -> int:
    """Of this process during one call; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


# %% 4. A transformer under them
def transformer(d: int, T: int, memory: int, precision: str, device: torch.device) -> list[Point]:
    """MLP, attention and LayerNorm: decode of a token in each of B sequences after T, prefill of 4 T tokens.

    Batches whose keys and values take more than `memory` bytes are left out.
    """
    dtype, h, points = PRECISIONS[precision][0], d // 128, []
    s, new = dtype.itemsize, partial(torch.empty, device=device, dtype=dtype)
    batches = [B for B in BATCHES if attention_decode(B, T, d, h, s).bytes <= memory]
    up, down = (new(shape).normal_(std=d**-0.5) for shape in ((4 * d, d), (d, 4 * d)))
    keys, values = (new(max(4, batches[-1]), h, T, 128).normal_() for _ in range(2))
    scale, shift = new(2, d).uniform_(0.5, 1.5)

    def feed_forward(x):
        return F.linear(F.gelu(F.linear(x, up)), down)

    def add(phase, name, rows, q, attention):
        x, causal = new(rows, d).normal_(), phase == "prefill"  # a decoded token sees all keys
        k, v = (kv[: rows if phase == "decode" else 4].reshape(len(q), h, -1, 128) for kv in (keys, values))
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        normalise = partial(F.layer_norm, x, (d,), scale, shift)
        points.append(Point(f"MLP {phase}", name, mlp(rows, d, s), partial(feed_forward, x), precision))
        points.append(Point(f"attention {phase}", name, attention, attend, precision))
        points.append(Point(f"LayerNorm {phase}", name, layer_norm(rows, d, s), normalise, precision))

    for B in batches:
        add("decode", f"B={B}", B, new(B, h, 1, 128).normal_(), attention_decode(B, T, d, h, s))
    T *= 4
    add("prefill", f"T={T}", T, new(1, h, T, 128).normal_(), attention_prefill(T, d, h, s))
    return points


def crossover(points: list[Point]) -> float:
    """The batch from which MLP decode is compute-bound: t = a + b B, fitted to all, is twice a there."""
    decode = [p for p in points if p.group == "MLP decode"]
    B = np.array([int(p.name.removeprefix("B=")) for p in decode])
    t = np.array([p.seconds for p in decode])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / t, B / t], axis=1), np.ones(len(t)))  # relative errors
    return float(a / b)


# %% 5. Fusion
def chain(x):
    """Scale, shift, and clamp from below and above: four elementwise operations."""
    return (x * 0.5 + 1).clamp(min=-6).clamp(max=6)


def chain_into(out, x):
    """The same in the memory of `out`."""
    torch.mul(x, 0.5, out=out).add_(1).clamp_(min=-6).clamp_(max=6)


def chain_in_blocks(out, x):
    """The same, a cacheful at a time: what one operation leaves in the cache the next one finds there."""
    for block, of_x in zip(out.split(BLOCK), x.split(BLOCK), strict=True):
        chain_into(block, of_x)


def fusions(n: int, compiled: bool, device: torch.device) -> tuple[list[Point], str]:
    """(the chain on n float32 numbers in several ways, what became of the compiler). All give equal bits."""
    x = torch.empty(n, device=device).uniform_(-20, 20)
    out, expected, told = torch.empty_like(x), chain(x), "not compiled: --quick"
    ways = {"in place": chain_into, "in place, in blocks": chain_in_blocks}
    if compiled:
        try:
            kernel = torch.compile(lambda out, x: out.copy_(chain(x)))
            kernel(out, x)
            ways["compiled"], told = kernel, "compiled into one loop by torch.compile"
        except Exception as error:  # no compiler, or none for this Python: there are as many kinds as systems
            told = f"not compiled: {str(error).partition(chr(10))[0][:80]}"
    apart, fused = Work(4 * n, 4 * 8 * n), Work(4 * n, 8 * n)
    points = [Point("chain", "a new array each", apart, partial(chain, x), footprint=8 * n)]
    for name, way in ways.items():
        way(out.zero_(), x)
        if not torch.equal(out, expected):
            raise CheckFailed(f"{name}: not what the operations give one after the other")
        work = apart if name == "in place" else fused
        points.append(Point("chain", name, work, partial(way, out, x), footprint=8 * n))
    return points, told


# %% 6. What came out
def arithmetic_tables(counted: list[tuple]) -> list[Table]:
    """Sections 1 and 2: what needs no machine, and the bytes that were counted."""
    top, b = ridge("H100"), math.ceil(2 * ridge("H100"))
    tiles, gpus = [], []
    for r, c in (64, 64), (128, 128), (256, 256), (b, b), TOGETHER:
        tiles.append((f"{r} x {c}", tile_intensity(r, c, 2), tile_intensity(r, c, 2) / top))
    for name, gpu in GPUS.items():
        *peaks, memory, gemm = gpu.values()
        gains = [gpu[p] and gpu["bf16"] / gpu[p] for p in ("fp32", "tf32")]
        gpus.append((name, *peaks, memory, ridge(name), *gains, gemm, gemm and gemm / gpu["bf16"]))
    title = "a tile of the output loads strips of A and B, and does b / s FLOPs for each byte; in bf16:"
    notes = (
        f"{b} x {b} float32 sums take {4 * b * b / 1e6:.1f} MB, the registers of an SM hold 0.26 MB. Last\n"
    )
    notes += "line: 132 SMs do 11 x 12 tiles of 128 at a time, and L2 hands each strip to all that need it."
    sheets = "data sheets: dense peaks in TFLOP/s, memory in TB/s, ridge of bf16 in FLOP/byte:"
    head = "|fp32|tf32|bf16|fp8|memory|ridge|bf16/fp32|bf16/tf32|best bf16 measured|of the peak"
    return [
        Table(title, "tile|FLOP/byte|of an H100's ridge", "|.1f|.2f", tiles, notes),
        Table("counted in numpy, float32:", "n|b|bytes counted|by formula|FLOP/byte", "||,|,|.1f", counted),
        Table(sheets, head, "||||||.0f|.1f|.1f||.2f", gpus),
    ]


def source_lines(roofs: Roofs, source: Point, faults: int) -> str:
    """What the source prints, and why its add is so slow."""
    lines = ["matrix multiply (n x n) @ (n x n), float32:"]
    for p in roofs.points:
        if (p.group, p.precision) == ("matmul", "fp32"):
            speed = f"{p.rates[0] / 1e9:7.1f} GFLOP/s"
            lines.append(
                f"  n={p.name[2:]:>4}: {speed}   arithmetic intensity {p.work.intensity:6.1f} FLOP/byte"
            )
    flops, rate = (r / 1e9 for r in roofs.points[-1].rates)
    length = f"{source.work.flops / 1e6:.0f}M floats"
    lines.append(f"elementwise add, {length}: {rate:.1f} GB/s, {flops:.2f} GFLOP/s (1 FLOP per 12 bytes)")
    why = f", for it makes a new array and times {faults:,} page faults" if faults > 100 else ""
    return "\n".join([*lines, f"  as x + y, the source's way: {source.rates[1] / 1e9:.1f} GB/s{why}"])


def roof_tables(roofs: Roofs, skipped: dict[str, float], cpu: bool) -> list[Table]:
    """Section 3."""
    products, arrays = ([p for p in roofs.points if p.group == group] for group in ("matmul", "stream"))
    rates = [p.rates[1] / 1e9 for p in arrays]
    steps = [(arrays[i].work.flops, *rates[i : i + 3]) for i in range(0, len(arrays), 3)]
    peaks, sizes = [], list(dict.fromkeys(p.name for p in products))
    for name in dict.fromkeys(p.precision for p in products):
        speeds = [p.rates[0] / 1e9 for p in products if p.precision == name]
        peaks.append((name, *speeds, roofs.bandwidth() / 1e9, roofs.ridge(name)))
    title = "matmul, GFLOP/s, in what this machine has units for:"
    widths = ",|.1f|.1f|.1f"
    head, formats = "|".join(["", *sizes, "DRAM, GB/s", "ridge, FLOP/byte"]), "|.1f" * (len(sizes) + 2)
    notes = ["tf32 on a CPU: float32 matmuls whose inputs are rounded to bf16"] * (
        cpu and "tf32" not in skipped
    )
    notes += [f"{name} skipped: {r:.2f} times the speed of fp32 at small n" for name, r in skipped.items()]
    fetched = "A CPU fetches the output of add too, before it overwrites it: bytes that are not counted here."
    return [
        Table("bandwidth of float32 arrays, GB/s:", "length|read|in place|add", widths, steps, fetched),
        Table(title, head, formats, peaks, "\n".join(notes)),
    ]


def point_tables(roofs: Roofs, layers: list[Point], chains: list[Point], dims: str, told: str) -> list[Table]:
    """Sections 4 and 5: predicted by the roofs, measured, and the ratio."""
    precision, rows, ways, apart = layers[0].precision, [], [], chains[1].seconds
    for p in sorted(layers, key=lambda p: p.group):
        compute, memory = roofs.terms(p)
        times = 1e6 * roofs.least(p), 1e6 * p.seconds, roofs.least(p) / p.seconds
        rows.append((p.group, p.name, p.work.intensity, "compute" if compute > memory else "memory", *times))
    for p in chains:
        times = 1e3 * roofs.least(p), 1e3 * p.seconds
        ways.append((p.name, p.work.bytes, *times, p.rates[1] / 1e9, apart / p.seconds))
    predicted = roofs.ridge(precision) * PRECISIONS[precision][0].itemsize / 2
    first = next(p for p in layers if p.group == "MLP decode")
    weights, call = first.rates[1] / 1e9, 1e6 * min(p.seconds for p in roofs.points)
    measured = f"{crossover(layers):.1f} measured"
    notes = [
        "Predicted: the longer of FLOPs / peak and bytes / bandwidth, a cache's if one holds them. More than",
        f"{TOLERANCE:.0%} faster is a fault of the measurement. Where it is slower, the kernel is: at B = 1",
        f"the MLP gets its weights at {weights:.0f} GB/s, and no call takes less than {call:.1f} us.",
        f"MLP decode does 2 B / s FLOPs a byte: memory-bound to B = {predicted:.1f} predicted, {measured}.",
        "Attention decode always is: each sequence has keys and values of its own.",
    ]
    title = f"a transformer on it, {precision}, {dims}:"
    head = "|batch|FLOP/byte|bound|predicted, us|measured, us|ratio"
    fused = f"four elementwise operations on {chains[0].work.flops / 4e6:.0f}M floats; {told}:"
    slow = "A new array each pays for page faults, as x + y does: fusing is held against doing it in place."
    return [
        Table(title, head, "||.2f||,.2f|,.2f|.2f", rows, "\n".join(notes)),
        Table(fused, "|bytes|predicted, ms|measured, ms|GB/s|speed-up", "|,|.1f|.1f|.1f|.1f", ways, slow),
    ]


def label(figure, axes, points: list[Point]) -> None:
    """Write each point's name at the nearest place around it where it meets no other name or point."""
    figure.draw_without_rendering()
    data = [(p.work.intensity, p.rates[0] / 1e9) for p in points]
    places = axes.transData.transform(data) * 72 / figure.dpi  # in dots, as sizes of letters are
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for p, xy, (x, y) in zip(points, data, places, strict=True):
        width = 4.5 * len(p.name)
        for dy, dx in itertools.product(sorted(range(-60, 61, 4), key=abs), (6, -width - 6, -width / 2)):
            left, right, low, high = x + dx, x + dx + width, y + dy - 4, y + dy + 5
            if all(right < a or c < left or high < b or d < low for a, b, c, d in taken):
                break
        taken.append((left, low, right, high))
        axes.annotate(p.name, xy, (dx, dy), textcoords="offset points", fontsize=7, va="center")


def draw(roofs: Roofs, points: list[Point], gpu_specs: bool):
    """Left: the roofs and every measured point. Right: bandwidth against the bytes streamed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    x = np.geomspace(0.06, 2000, 400)
    for name in dict.fromkeys(p.precision for p in roofs.points if p.group == "matmul"):
        peak = roofs.peak(name) / 1e9
        left.plot(x, np.minimum(peak, x * roofs.bandwidth() / 1e9), color="black", lw=1)
        left.text(1.1 * x[-1], peak, f"{name}, ridge {roofs.ridge(name):.1f}", va="center")
    cached = np.minimum(roofs.peak("fp32"), x * roofs.bandwidth(0)) / 1e9
    left.plot(x, cached, "k:", lw=1, label="fp32, out of a cache")
    for name, gpu in GPUS.items() if gpu_specs else ():
        left.plot(x, np.minimum(gpu["bf16"], x * gpu["memory"]) * 1e3, color="gray", lw=1)
        left.text(x[0], x[0] * gpu["memory"] * 1e3, f"{name} bf16", color="gray", ha="right", va="center")
    kinds = dict.fromkeys((p.group.split()[0], p.precision) for p in points)
    for marker, kind in zip("os^vPDX*<>ph", kinds, strict=False):
        some = [p for p in points if (p.group.split()[0], p.precision) == kind]
        xs, ys = [p.work.intensity for p in some], [p.rates[0] / 1e9 for p in some]
        left.plot(xs, ys, marker, label=", ".join(kind))
    left.set(xscale="log", yscale="log", xlim=(0.015 if gpu_specs else 0.04, 2e4))
    left.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="GFLOP/s")
    label(figure, left, points)
    left.set_title("Left of its ridge a machine waits for memory, right of it for arithmetic")
    for name in ("read", "in place", "add"):
        some = [p for p in roofs.points if p.name == name]
        right.plot([p.work.bytes for p in some], [p.rates[1] / 1e9 for p in some], "o-", label=name)
    right.set(xscale="log", xlabel="bytes streamed by a call", ylabel="GB/s", ylim=0)
    right.set_title("Bandwidth: the call, the caches, DRAM")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="lower right" if axes is left else "upper left")
    return figure


def settle(roofs: list[Point], points: list[Point], time_it) -> tuple[Roofs, list[Point]]:
    """(roofs, points), timed; the roofs again after the points, as a shared machine's speed drifts.

    Of a roof's medians the best counts. A point above is a fault of the measurement: it is timed anew, and so
    are the roofs, up to twice.
    """
    roofs, points = [time_it(p) for p in roofs], [time_it(p) for p in points]
    for _ in range(3):
        pairs = zip(roofs, map(time_it, roofs), strict=True)
        roofs = [min(pair, key=lambda p: p.seconds) for pair in pairs]
        above = Roofs(roofs).above(points)
        if not above:
            break
        points = [time_it(p) if p in above else p for p in points]
    return Roofs(roofs), points


def main():
    parser = common.Parser(__doc__)
    parser.add_argument("--gpu-specs", action="store_true", help="draw the GPUs' data-sheet roofs too")
    args = parser.parse_args()
    device, threads = common.choose_device(args.device), common.usable_cpus()
    quick, gpu, memory = args.quick, device.type == "cuda", common.usable_memory(device) // 4
    if memory < 2**28:
        raise BadInput(f"this process may use {4 * memory / 1e9:.1f} GB of memory, 1.1 GB are needed")
    common.writable(args.out)
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    print(common.header(device, "fp32", "where no other is named", threads, args.seed), flush=True)

    counted = count_tiles(*((128, (16, 64, 128)) if quick else (512, (16, 64, 128, 512))), args.seed)
    ratios = {name: speed_ratio(name, device) for name in PRECISIONS}
    native = [name for name, ratio in ratios.items() if ratio >= 0.6 * PRECISIONS[name][1]]
    sizes = SIZES[:-1] if quick else (*SIZES, 8192) if gpu else SIZES
    products = [p for name in native for p in matmuls(name, sizes, device)]
    lengths = [n for n in FLOATS if 28 * n <= memory]  # seven arrays: x, y, z, x + y; x, out, expected
    *arrays, source = streams(lengths, device)
    d, T = (8192, 2048) if gpu else (512, 64) if quick else (2048, 256)
    layers = transformer(d, T, memory, "bf16" if gpu else "fp32", device)
    chains, told = fusions(lengths[-1], not quick, device)
    with tqdm(desc="measuring", unit=" operations", leave=False) as bar:

        def time_it(point):
            bar.update()
            return point.measured(device, 0.03 if quick else 0.15)

        roofs, points = settle([*products, *arrays], [source, *layers, *chains], time_it)
    source, layers, chains = points[0], points[1 : -len(chains)], points[-len(chains) :]

    skipped = {name: ratio for name, ratio in ratios.items() if name not in native}
    source_said = source_lines(roofs, source, page_faults(source.call))
    before, after = arithmetic_tables(counted), roof_tables(roofs, skipped, not gpu)
    after += point_tables(roofs, layers, chains, f"d = {d}, h = {d // 128}, T = {T}", told)
    common.save_results(args, device, {"source": source_said.splitlines()}, [*before, *after])
    shown = [*(p for p in roofs.points if p.group == "matmul"), roofs.points[-1], *points]
    common.save_figure(args.out / f"{NAME}.png", draw(roofs, shown, args.gpu_specs))
    for part in [*before, source_said, *after]:
        print(f"\n{part}")
    if above := roofs.above(points):
        names = ", ".join(f"{p.group} {p.name} by {roofs.least(p) / p.seconds - 1:.0%}" for p in above)
        raise CheckFailed(f"a measurement is wrong: above its roof is {names}")


if __name__ == "__main__":
    common.run(main)

# Left out: cores and caches counted one by one; latency; instructions that are neither FLOPs nor bytes.
# Exercise: decode with int8 weights moves half the bytes of bf16. Where is the ridge then, and which batch
# reaches it?
# Next: 02_scaling_study.py spends the FLOPs.
