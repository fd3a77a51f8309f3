# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""How few bits does training need, and what breaks where they are missing?

A format spends its bits on range (exponent) or on precision (mantissa). bf16 has the range of fp32, fp16 more
precision; each fails in its own way, and each failure has its own cure. You will see
  - the limits of six formats, worked out from their bits and held against PyTorch's, code by code;
  - a real gradient in fp16, at loss scales from 1 to 2^24: what becomes 0, what overflows;
  - sums that stop, updates that vanish, softmax and variance in 16 bit;
  - dynamic loss scaling by hand, step for step with the library's;
  - one GPT trained in ten ways from one start: which follow fp32, which do not, and at which step they fail;
  - speed, bytes a parameter, and the error of matmuls in fp8.

    python 05_mixed_precision.py            a minute on two cores, more where fp16 and bf16 are emulated
    python 05_mixed_precision.py --quick    the same in miniature, under ten seconds

Notation (example)
    e, m  bits of exponent, of mantissa (8, 7)      eps   distance from 1 to the next number, 2^-m
    B, T  sequences in a batch, tokens (16, 64)     g, w  a gradient, a weight
    d, L  width, layers (32, 1)                     n     side of a matrix (1,024)
"""

import copy
import math
import statistics
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import common
from common import GPT, CheckFailed, Table, batch

NAME = Path(__file__).stem
WIDTH, LAYERS, B, T = 32, 1, 16, 64
STEPS, WARM_UP, LEARNING_RATE, WEIGHT_DECAY = 300, 20, 2e-3, 0.1  # AdamW, linear warm-up, then constant
SEEDS = 5  # runs in fp32, whose spread is the yardstick
VAL_BATCHES, VAL_SEED = 25, 123
SMOOTH, FAR = 15, 3  # steps whose losses are averaged; spreads from which on a run has left that in fp32
MICRO_BATCHES = 4096  # by which a loss is divided where gradients of that many are accumulated
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


# %% 1. The formats, from their bits
@dataclass(frozen=True)
class Format:
    """Sign, e bits of exponent, m of mantissa. e4m3 has no infinity (Micikevicius et al. 2022)."""

    name: str
    e: int
    m: int
    dtype: torch.dtype | None
    infinity: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.e - 1) - 1

    @property
    def eps(self) -> float:
        return 2.0**-self.m

    @property
    def least_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def least(self) -> float:
        """The least subnormal."""
        return self.least_normal * self.eps

    @property
    def max(self) -> float:
        """The code before infinity's, or before e4m3's NaN."""
        last = (2**self.e - 1 << self.m) - 1 if self.infinity else 2 ** (self.e + self.m) - 2
        return self.decode(torch.tensor(last)).item()

    def decode(self, code):
        """What codes (int64) mean, as float64."""
        sign = 1 - 2 * (code >> self.e + self.m).double()
        exponent, fraction = code >> self.m & 2**self.e - 1, (code & 2**self.m - 1) * self.eps
        # Exponent 0 has no leading 1: the subnormal numbers, evenly spaced down to 0.
        power = 2.0 ** (exponent.clamp(min=1) - self.bias).double()
        value = torch.where(exponent == 0, fraction, 1 + fraction) * power
        top = exponent == 2**self.e - 1
        if self.infinity:
            value = torch.where(top, torch.where(fraction == 0, math.inf, math.nan), value)
        else:
            value = torch.where(top & (fraction == 1 - self.eps), math.nan, value)
        return sign * value

    def round(self, x):
        """The nearest number of this format as float64, halfway the even one; infinite beyond `max`.

        So e4m3 too, though it has no infinity: hardware gives its largest number there, or NaN.
        """
        x = x.double()
        exponent = (torch.frexp(x).exponent - 1).clamp(min=1 - self.bias)
        step = 2.0 ** (exponent - self.m).double()
        rounded = torch.round(x / step) * step
        return torch.where(rounded.abs() > self.max, rounded * math.inf, rounded)

    def encode(self, x: float) -> str:
        """The bits of x >= 0 as "sign exponent mantissa". Raises ValueError if x rounds to infinity."""
        x = self.round(torch.tensor(x, dtype=torch.float64)).item()
        if not 0 <= x < math.inf:
            raise ValueError(f"{self.name} has no bits for {x} here")
        exponent = max(math.frexp(x)[1] - 1, 1 - self.bias) if x else 1 - self.bias
        fraction = round(x / 2.0**exponent * 2**self.m)  # 2^m and more has the leading 1
        code = (exponent + self.bias - 1 << self.m) + fraction
        bits = f"{code:0{1 + self.e + self.m}b}"
        return f"{bits[0]} {bits[1 : 1 + self.e]} {bits[1 + self.e :]}"


FORMATS = (
    Format("fp32", 8, 23, FP32),
    Format("tf32", 8, 10, None),
    Format("fp16", 5, 10, FP16),
    Format("bf16", 8, 7, BF16),
    Format("fp8 e4m3", 4, 3, torch.float8_e4m3fn, infinity=False),
    Format("fp8 e5m2", 5, 2, torch.float8_e5m2),
)
BY_NAME = {f.name: f for f in FORMATS}


def check_format(f: Format) -> int:
    """How many codes were decoded as PyTorch does: all of them up to 16 bits. Raises CheckFailed."""
    info, bits = torch.finfo(f.dtype), 1 + f.e + f.m
    ours, theirs = (f.max, f.least_normal, f.eps), (info.max, info.smallest_normal, info.eps)
    integers = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
    codes = torch.arange(2**bits) if bits <= 16 else torch.randint(0, 2**bits, (10**6,))
    values = codes.to(integers).view(f.dtype).double()
    wrong = ~((f.decode(codes) == values) | (f.decode(codes).isnan() & values.isnan()))
    x = torch.randn(10**5) * 2.0 ** torch.randint(-30, 8, (10**5,))
    x = torch.cat([x, values[values.isfinite()].float() * (1 + f.eps / 2)])  # halfway between two numbers
    x = x[x.abs() <= f.max]
    if ours != theirs or wrong.any() or not torch.equal(f.round(x), x.to(f.dtype).double()):
        raise CheckFailed(f"{f.name}: ours {ours}, torch.finfo {theirs}, {wrong.sum()} codes differ")
    return len(codes)


def format_tables() -> list[Table]:
    rows, bits = [], []
    for f in FORMATS:
        limits = f.max, f.least_normal, f.least, f.eps
        rows.append((f.name, f"1 + {f.e} + {f.m}", *limits, check_format(f) if f.dtype else None))
        value = f.round(torch.tensor(0.1)).item()
        bits.append((f.name, f.encode(0.1), value, abs(value / 0.1 - 1), f.eps / 2))
    notes = """Max, least normal and eps are those of torch.finfo; tf32, as GPUs read float32 in matmuls, has
no dtype. Of bf16 it is said that it never overflows: it does where fp32 does, within 0.4 %."""
    return [
        Table("formats, from their bits:", "|sign + e + m|max|least normal|least subnormal|eps|codes checked",
              "||.6g|.6g|.6g|.6g|,", rows, notes),
        Table("0.1, bit by bit:", "|sign, exponent, mantissa|is|relative error|at most, eps / 2",
              "||.8f|.1e|.1e", bits),
    ]  # fmt: skip


# %% 2. What goes wrong
def flat(tensors):
    return torch.cat([x.detach().flatten() for x in tensors]).cpu()


def gradients(model, x, y) -> dict:
    """Flat gradients of the loss: of all weights, and of what linear layers put out, in 16 bit too."""
    flowing = []
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [
        m.register_full_backward_hook(lambda m, inputs, outputs: flowing.append(outputs[0])) for m in linear
    ]
    model.zero_grad()
    model.loss(x, y).backward()
    for hook in hooks:
        hook.remove()
    return {"weights": flat(p.grad for p in model.parameters()), "outputs": flat(flowing)}


def shares(g, scale: float, f: Format) -> tuple[float, float, float]:
    """Of the gradients that are not 0: what share times scale rounds to 0, is subnormal, overflows."""
    g = g[g != 0].double() * scale
    rounded = f.round(g).abs()
    masks = rounded == 0, (rounded > 0) & (rounded < f.least_normal), rounded.isinf()
    return tuple(mask.double().mean().item() for mask in masks)


def gradient_table(found: dict) -> Table:
    """Shares in fp16 by loss scale, and in bf16 without."""
    rows = []
    for f, exponent in [*((BY_NAME["fp16"], k) for k in range(0, 25, 4)), (BY_NAME["bf16"], 0)]:
        cells = [share for g in found.values() for share in shares(g, 2.0**exponent, f)]
        rows.append((f"{f.name}, 2^{exponent}", *cells))
    head = "loss scale|weights: to 0|subnormal|overflow|outputs: to 0|subnormal|overflow"
    weights, outputs = map(len, found.values())
    title = f"the gradient of a trained GPT, {weights:,} weights, {outputs:,} outputs of linear layers:"
    note = "Of those that are not 0 in fp32. To 0: up to 2^-25 / scale; overflow: from 65,520 / scale on."
    return Table(title, head, "|.2%|.2%|.2%|.2%|.2%|.2%", rows, note)


def count_up(dtype) -> float:
    """0.001 ten thousand times, added up one by one."""
    total, small = torch.zeros((), dtype=dtype), torch.tensor(0.001, dtype=dtype)
    for _ in range(10_000):
        total += small
    return total.item()


def accidents(weights, updates) -> Table:
    """What 16 bit make of harmless arithmetic. weights, updates (N,): those of a step of AdamW."""

    def softmax(x):
        return (x.exp() / x.exp().sum())[0]

    def variance(x):
        return (x * x).mean() - x.mean() ** 2

    x, y = torch.tensor([12.0, 11.0]), torch.tensor([254.0, 256.0]).repeat(32)
    cases = {
        "0.001 added up 10,000 times": count_up,
        "1 + 2^-9: a weight and its update": lambda t: (
            torch.ones((), dtype=t) + torch.tensor(2.0**-9, dtype=t)
        ),
        "softmax(12, 11), e^x unshifted": lambda t: softmax(x.to(t)),
        "LayerNorm's variance, 254 and 256: mean x^2 - (mean x)^2": lambda t: variance(y.to(t)),
        "share of weights that a step of AdamW leaves as they were": lambda t: (
            (weights.to(t) + updates.to(t) == weights.to(t))[updates != 0].double().mean()
        ),
    }
    dtypes = torch.float64, FP32, FP16, BF16
    results = {name: [float(case(t)) for t in dtypes] for name, case in cases.items()}
    rows = [(name, *(x if math.isfinite(x) else None for x in row)) for name, row in results.items()]
    notes = """-: not finite. A sum stops where half the distance to the next number exceeds what is added,
here at 4 in fp16, 0.5 in bf16; so does a weight. The library's softmax, LayerNorm and sums add up in fp32
whatever their inputs are, and autocast leaves them in fp32."""
    return Table("what 16 bit make of it:", "|float64|fp32|fp16|bf16", "|.6g|.6g|.6g|.6g", rows, notes)


# %% 3. Dynamic loss scaling by hand
class LossScaler:
    """A loss times `scale` keeps small gradients above fp16's least number (Micikevicius et al. 2018, 3.2).

    After an overflow the step is skipped and the scale backs off; after `interval` steps without, it grows.
    """

    def __init__(
        self, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ):
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.good_steps, self.overflow = 0, False

    def unscale(self, parameters) -> None:
        """Divide the gradients, in place; to do before they are clipped. Raises ValueError for fp16."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if any(g.dtype == FP16 for g in grads):
            raise ValueError("gradients in fp16 would lose by being divided what scaling has kept")
        for g in grads:
            g /= self.scale
        self.overflow = not all(g.isfinite().all() for g in grads)

    def step(self, optimiser) -> None:
        if not self.overflow:
            optimiser.step()

    def update(self) -> None:
        """Once a step: one scaler lives as long as the run."""
        self.good_steps = 0 if self.overflow else self.good_steps + 1
        if self.overflow:
            self.scale *= self.backoff
        elif self.good_steps == self.interval:
            self.good_steps = 0
            if self.scale * self.growth <= BY_NAME["fp32"].max:
                self.scale *= self.growth


def half_step(model, optimiser, scaler, x, y, factor: float) -> bool:
    """One step in fp16 with either scaler, clipped; whether it was taken. factor: of the loss."""
    device, library = x.device.type, isinstance(scaler, torch.amp.GradScaler)
    with torch.autocast(device, FP16):
        loss = model.loss(x, y)
    scale = scaler.get_scale() if library else scaler.scale
    optimiser.zero_grad()
    (scaler.scale(loss * factor) if library else loss * factor * scale).backward()
    scaler.unscale_(optimiser) if library else scaler.unscale(model.parameters())
    clip_grad_norm_(model.parameters(), 1.0)
    before = model.head.weight.detach().clone()
    scaler.step(optimiser)
    scaler.update()
    return not torch.equal(before, model.head.weight)


def new_model(seed: int, device):
    """(model, optimiser, batches' generator), the same for a seed."""
    torch.manual_seed(seed)
    model = GPT(WIDTH, LAYERS, T=T).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return model, optimiser, torch.Generator().manual_seed(seed)


def compare_scalers(steps: int, planted, data, seed: int, device) -> Table:
    """Ours and the library's on two copies of a model, the loss times 10^6 in the planted steps."""
    ours, theirs = new_model(seed, device), new_model(seed, device)
    scaler = LossScaler(interval=8)
    library = torch.amp.GradScaler(device.type, growth_interval=8)
    if not library.is_enabled():
        raise CheckFailed("torch.amp.GradScaler is disabled: it would scale nothing")
    rows = []
    for step in range(1, steps + 1):
        x, y = batch(data, B, T, ours[2])
        factor, scale = 1e6 if step in planted else 1.0, scaler.scale
        taken = [half_step(*pair[:2], s, x, y, factor) for pair, s in ((ours, scaler), (theirs, library))]
        if taken[0] != taken[1] or scaler.scale != library.get_scale():
            raise CheckFailed(
                f"step {step}: ours {taken[0]}, {scaler.scale}; library {taken[1]}, {library.get_scale()}"
            )
        if scaler.scale != scale:
            what = "grows, 8 good steps in a row" if taken[0] else "backs off, the step is skipped"
            rows.append((step, math.log2(scale), math.log2(scaler.scale), what))
    if not all(map(torch.equal, ours[0].parameters(), theirs[0].parameters())):
        raise CheckFailed("after the same steps our weights differ from the library's")
    title = f"dynamic loss scaling, {steps} steps, overflows planted at {', '.join(map(str, planted))}:"
    note = "Same scales, same skipped steps and, bit for bit, same weights as torch.amp.GradScaler."
    return Table(title, "step|log2 scale|then|what happens", "|.0f|.0f|", rows, note)


def scaler_mistakes(steps: int, data, seed: int, device) -> str:
    """A scaler for each step, as in the source, against one for the run; clipping before unscaling."""
    taken = []
    for one_for_the_run, factor in (
        (True, B * T),
        (False, B * T),
        (False, 1),
    ):  # summed over tokens, or averaged
        model, optimiser, generator = new_model(seed, device)
        scaler, count = LossScaler(), 0
        for _ in range(steps):
            scaler = scaler if one_for_the_run else LossScaler()
            count += half_step(model, optimiser, scaler, *batch(data, B, T, generator), factor)
        taken.append(count)
    if not taken[0] > taken[1]:
        raise CheckFailed(f"of {steps} steps one scaler takes {taken[0]}, one a step {taken[1]}")
    model, _, generator = new_model(seed, device)
    (model.loss(*batch(data, B, T, generator)) * 2.0**16).backward()
    norm = clip_grad_norm_(model.parameters(), 1.0) / 2.0**16
    clipped = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])) / 2.0**16
    return f"""A scaler made in each step, as in the source, takes {taken[2]} of {steps} steps: 2^16 happens
to fit the mean loss. Of a loss summed over tokens it takes {taken[1]}, as each starts at 2^16 and overflows;
one scaler for the run takes {taken[0]}.
Clipped to 1 before it is unscaled, a gradient of norm {norm:.2f} is left with {clipped:.1e}."""


# %% 4. One model, trained in ten ways
@dataclass(frozen=True)
class Recipe:
    """dtype of autocast, if any, and of weights; master weights in fp32; scaling; divisor of the loss."""

    name: str
    autocast: torch.dtype | None = None
    weights: torch.dtype = FP32
    master: bool = False
    scaling: bool = False
    divisor: int = 1
    precision: str = "fp32"

    def bytes(self) -> tuple[int, int, int, int]:
        """A parameter: its weight, gradient, master weight, and two moments of Adam."""
        s = self.weights.itemsize
        exact = 4 if self.master else s
        return s, exact, 4 if self.master else 0, 2 * exact


RECIPES = (
    Recipe("fp32"),
    Recipe("tf32", precision="tf32"),
    Recipe("bf16 autocast", BF16),
    Recipe("bf16 weights, fp32 master", weights=BF16, master=True),
    Recipe("bf16 weights", weights=BF16),
    Recipe("fp16 autocast, scaling", FP16, scaling=True),
    Recipe("fp16 autocast", FP16),
    Recipe("fp16 autocast, loss / 4,096", FP16, divisor=MICRO_BATCHES),
    Recipe("fp16 autocast, loss / 4,096, scaling", FP16, scaling=True, divisor=MICRO_BATCHES),
    Recipe("fp16 weights", weights=FP16),
)


def unavailable(recipe: Recipe, device) -> str:
    """Why a recipe would not be what it says, or nothing."""
    a = torch.randn(B * T, WIDTH, device=device)
    if recipe.autocast:
        with warnings.catch_warnings(), torch.autocast(device.type, recipe.autocast):
            warnings.simplefilter("ignore")
            if (got := (a @ a.mT).dtype) != recipe.autocast:
                return f"under autocast a matmul gives {got}"
    if recipe.precision == "tf32":
        model, tokens = new_model(0, device)[0], torch.arange(B * T, device=device).view(B, T) % common.V
        logits = []
        for precision in ("tf32", "fp32"):
            common.set_precision(precision, device)
            logits.append(model(tokens))
        if torch.equal(*logits):
            return "this model's small matmuls stay in fp32 here"
    return ""


def train(recipe: Recipe, seed: int, steps: int, train_data, val_data, device, bar):
    """(losses, val loss in fp32, step that failed, seconds a step, bytes a parameter; model; optimiser)."""
    model, optimiser, generator = new_model(seed, device)
    master = [p.detach().clone() for p in model.parameters()] if recipe.master else None
    model.to(recipe.weights)
    parameters = list(model.parameters())
    stepped = master or parameters
    optimiser = torch.optim.AdamW(stepped, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scaler = LossScaler(interval=100) if recipe.scaling else LossScaler(1.0)
    common.set_precision(recipe.precision, device)
    losses, seconds, failed = [], [], None
    for step in range(1, steps + 1):
        x, y = batch(train_data, B, T, generator)
        start = time.perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / WARM_UP)
        with torch.autocast(device.type, recipe.autocast or BF16, enabled=recipe.autocast is not None):
            loss = model.loss(x, y)
        model.zero_grad()
        (loss / recipe.divisor * scaler.scale).backward()
        for w, p in zip(stepped, parameters, strict=True):
            gradient, p.grad = p.grad, None
            w.grad = gradient.to(w.dtype)
        if recipe.scaling:
            scaler.unscale(stepped)
        for w in stepped:  # as if the gradients of so many micro-batches had been added up
            w.grad *= recipe.divisor
        scaler.step(optimiser)
        if recipe.scaling:
            scaler.update()
        if recipe.master:
            with torch.no_grad():
                torch._foreach_copy_(parameters, master)
        bar.update()
        if not math.isfinite(loss.item()):
            failed = step
            break
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    common.set_precision("fp32", device)
    held = [parameters, [w.grad for w in stepped], master or []]
    held.append([m for state in optimiser.state.values() for m in (state["exp_avg"], state["exp_avg_sq"])])
    N = sum(p.numel() for p in parameters)
    sizes = [sum(t.numel() * t.element_size() for t in tensors) / N for tensors in held]
    val = None if failed else validation_loss(model, val_data)
    times = statistics.median(seconds[2:] or seconds)
    return (
        {"losses": losses, "val": val, "failed": failed, "seconds": times, "bytes": sizes},
        model,
        optimiser,
    )


def validation_loss(model, data) -> float:
    """Mean over fixed batches, nats a token, computed in fp32 whatever the weights were trained in."""
    model, generator = copy.deepcopy(model).float(), torch.Generator().manual_seed(VAL_SEED)
    with torch.no_grad():
        losses = [model.loss(*batch(data, B, T, generator)).item() for _ in range(VAL_BATCHES)]
    return sum(losses) / len(losses)


def smooth(losses: list[float]) -> list[float]:
    """At each step the mean of the last SMOOTH."""
    return [statistics.mean(losses[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(losses))]


def leaves(losses: list[float], base: list[float], margin: float) -> int | None:
    """The first step at which the smoothed losses are more than margin above the base's."""
    pairs = enumerate(zip(smooth(losses), smooth(base), strict=False), start=1)
    return next((step for step, (a, b) in pairs if a - b > margin), None)


def recipe_table(found: dict, spread: list[float], skipped: dict, steps: int) -> Table:
    """Losses side by side. found: by recipe name; spread: val losses in fp32 over seeds."""
    base, deviation, rows = found["fp32"], statistics.stdev(spread), []
    for name, run in found.items():
        last = None if run["failed"] else statistics.mean(run["losses"][-20:])
        moved = run["val"] and run["val"] - base["val"]
        times = None if run["failed"] else run["seconds"] / base["seconds"]
        steps_of = run["left"], run["failed"]
        rows.append((name, last, run["val"], moved, moved and moved / deviation, *steps_of, times))
    notes = f"""Over {len(spread)} seeds val losses of fp32 spread by {deviation:.4f} (standard deviation).
leaves at: the step where the mean train loss of {SMOOTH} is more than {FAR} spreads above that of fp32.
loss / 4,096: as when gradients of that many micro-batches are added up, here by a factor in fp32.
fp16 weights: 0.001 g^2 and AdamW's 1e-8 round to 0, so that weights move by m / 0."""
    notes = "\n".join([notes, *(f"{name} skipped: {why}" for name, why in skipped.items())])
    head = "|train loss|val loss|minus fp32|in spreads|leaves at|not finite at|step time / fp32"
    title = f"GPT of {WIDTH} x {LAYERS}, {steps} steps from the same start on the same batches, nats a token:"
    return Table(title, head, "|.4f|.4f|+.4f|+.2f|||.2f", rows, notes)


def bytes_table(found: dict) -> Table:
    """Bytes a parameter: of the tensors that a run holds, beside the recipe's."""
    rows = []
    for recipe in RECIPES:
        if recipe.name in found and not recipe.divisor > 1:
            measured = found[recipe.name]["bytes"]
            rows.append((recipe.name, *measured, sum(measured), sum(recipe.bytes())))
    note = """Autocast makes 16-bit copies of weights for the time of a pass, 2 bytes more. Beside
master weights we hold gradients in fp32, 18 in all; the ZeRO paper, in 16 bit: 2 + 2 + 4 + 8 = 16."""
    return Table("bytes a parameter, counted:", "|weights|gradients|master|Adam|in all|predicted",
                 "|.0f|.0f|.0f|.0f|.0f|.0f", rows, note)  # fmt: skip


# %% 5. Speed, and fp8
def speed_table(sizes, device) -> Table:
    """Matmuls in each format, as ratios to fp32; larger ones only where the smallest shows units for it."""
    rows, notes, base, exact = [], [], {}, None

    def product(name, dtype, n):
        common.set_precision(name, device)
        a = torch.ones(n, n, dtype=dtype, device=device).cumsum(0).sqrt()
        out = torch.empty_like(a)
        seconds = common.measure(partial(torch.mm, a, a, out=out), device, 9)
        return base.setdefault(n, seconds) / seconds, out

    smallest, *larger = sizes
    for name, dtype in ("fp32", FP32), ("tf32", FP32), ("bf16", BF16), ("fp16", FP16):
        ratio, out = product(name, dtype, smallest)
        exact, why = (out if name == "fp32" else exact), ""
        if name == "tf32" and torch.equal(out, exact):
            why = "none here, float32 matmuls do not round their inputs"
        elif ratio < 0.9:
            why = "slower than fp32, as where there are no units for it; larger n skipped"
        notes += [f"{name}: {why}"] * bool(why)
        rows.append((name, ratio, *(None if why else product(name, dtype, n)[0] for n in larger)))
    common.set_precision("fp32", device)
    if device.type == "cpu":
        notes.append("tf32 on a CPU, where there is one: float32 matmuls whose inputs are rounded to bf16")
    head = "|".join(["", *(f"n = {n:,}" for n in sizes)])
    return Table("speed of matmuls, times that of fp32:", head, "|.2f" * len(sizes), rows, "\n".join(notes))


def scaled_matmul(a, b, f: Format):
    """a @ b of inputs rounded to f, each multiplied before so that its largest value becomes f's.

    What hardware does with fp8: products of few bits, added up in fp32, divided by both scales.
    """
    scales = [f.max / (x.abs().max().item() or 1) for x in (a, b)]
    a, b = (f.round(x.double() * scale).float() for x, scale in zip((a, b), scales, strict=True))
    return (a @ b).double() / (scales[0] * scales[1])


def fp8_table(n: int, device) -> Table:
    """Relative error of a product of a matrix like activations and one like gradients, times 2^-20."""
    a, b = torch.randn(n, n), torch.randn(n, n) * 2.0**-20
    exact, rows = a.double() @ b.double(), []

    def error(product):
        return ((product - exact).norm() / exact.norm()).item()

    for name in ("fp8 e5m2", "fp8 e4m3", "bf16", "fp16"):
        f = BY_NAME[name]
        plain = error(f.round(a).float() @ f.round(b).float())
        scaled = error(scaled_matmul(a, b, f)) if name != "bf16" else None  # it has the range of fp32
        predicted = f.eps * math.sqrt(2 / 12) / 1.4
        rows.append((name, plain, scaled, predicted, (scaled or plain) / predicted))
    told = library_fp8(a, b, device)
    note = "predicted: two roundings, each even over +-eps / 2 of a number that is 1.4 times its power of 2."
    return Table("error of a matmul, relative, scaled per tensor:", "|not scaled|scaled|predicted|ratio",
                 "|.1e|.1e|.1e|.2f", rows, f"{note}\n{told}")  # fmt: skip


def library_fp8(a, b, device) -> str:
    """What the library's scaled matmul gives on the same numbers, where there is one."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "This GPU has no fp8 units."
    f = BY_NAME["fp8 e4m3"]
    scales = [x.abs().max().float() / f.max for x in (a, b)]
    eight = [(x / scale).to(f.dtype).to(device) for x, scale in zip((a, b), scales, strict=True)]
    try:  # b must be column-major
        product = torch._scaled_mm(
            eight[0], eight[1].t().contiguous().t(), *(s.to(device) for s in scales), out_dtype=BF16
        )
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"The library's scaled matmul: not here ({str(error).splitlines()[0][:60]})"
    ours = scaled_matmul(a, b, f)
    apart = ((product.double().cpu() - ours).norm() / ours.norm()).item()
    if not apart < 2 * BY_NAME["bf16"].eps:
        raise CheckFailed(f"the library's fp8 matmul differs from ours by {apart:.1e}")
    where = "on fp8 units" if device.type == "cuda" else "emulated on the CPU"
    return f"The library's e4m3 matmul, {where}, is {apart:.1e} from ours: its output is bf16."


# %% 6. The picture
def draw(found: dict, grads: dict):
    """Losses over steps; the gradient's histogram over what the formats can hold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, run in found.items():
        label = f"{name}: not finite at step {run['failed']}" if run["failed"] else name
        style = {"lw": 2.5, "marker": "x" if run["failed"] else ""} if run["left"] else {"lw": 1, "ls": "--"}
        left.plot(range(1, len(run["losses"]) + 1), smooth(run["losses"]), label=label, **style)
    left.set(xlabel="step", ylabel=f"train loss, nats a token, mean of {SMOOTH} steps")
    left.set_title("Dashed: follows fp32. Bold: leaves it")
    left.legend(frameon=False, fontsize=8)
    for name, g in grads.items():
        name = f"of {name}"
        right.hist(
            g[g != 0].abs().log2().numpy(), bins=80, range=(-60, 10), density=True, alpha=0.5, label=name
        )
    top = right.get_ylim()[1]
    for i, f in enumerate(FORMATS[2:]):
        y, ends = -top * (i + 1) / 12, [math.log2(x) for x in (f.least, f.least_normal, f.max)]
        right.plot(ends[1:], [y, y], color="black", lw=5, solid_capstyle="butt")
        right.plot(ends[:2], [y, y], color="gray", lw=2, solid_capstyle="butt")
        right.text(21, y, f.name, va="center", fontsize=8)
    right.set(xlim=(-60, 20), ylim=(-top * 0.45, None), yticks=[])
    right.set_xlabel("log2 of the gradient's size. Formats: normal numbers black, subnormal gray")
    right.set_title("A gradient, and what the formats hold")
    right.legend(frameon=False)
    return figure


def main():
    parser = common.Parser(__doc__)
    args = parser.parse_args()
    device, threads = common.choose_device(args.device), common.usable_cpus()
    common.writable(args.out)
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    common.set_precision("fp32", device)
    print(common.header(device, "fp32", "where no other is named", threads, args.seed), flush=True)
    train_data, val_data = common.split_corpus(common.read_corpus()[0], T)

    steps, seeds = (15, 2) if args.quick else (STEPS, SEEDS)
    tables = format_tables()
    planted = (15, (4, 5)) if args.quick else (40, (11, 12, 25))
    scaling = compare_scalers(*planted, train_data, args.seed, device)
    mistakes = scaler_mistakes(16, train_data, args.seed, device)
    skipped = {r.name: why for r in RECIPES if (why := unavailable(r, device))}
    recipes = [r for r in RECIPES if r.name not in skipped]
    with tqdm(total=steps * (len(recipes) + seeds - 1), desc="training", unit=" steps", leave=False) as bar:
        run = partial(train, steps=steps, train_data=train_data, val_data=val_data, device=device, bar=bar)
        trained = {recipe.name: run(recipe, args.seed) for recipe in recipes}
        spread = [run(RECIPES[0], args.seed + i)[0]["val"] for i in range(1, seeds)]
    found = {name: result for name, (result, *_) in trained.items()}
    spread = [found["fp32"]["val"], *spread]
    for run in found.values():
        margin = FAR * statistics.stdev(spread)
        run["left"] = run["failed"] or leaves(run["losses"], found["fp32"]["losses"], margin)
    _, model, optimiser = trained["fp32"]
    grads = gradients(model, *batch(train_data, B, T, torch.Generator().manual_seed(VAL_SEED)))
    before = flat(model.parameters())
    optimiser.step()
    tables += [gradient_table(grads), accidents(before, flat(model.parameters()) - before), scaling]
    recipes = recipe_table(found, spread, skipped, steps)
    sizes = (256, 512) if args.quick else (256, 1024, 4096 if device.type == "cuda" else 2048)
    last = [recipes, bytes_table(found), speed_table(sizes, device), fp8_table(256, device)]
    common.save_results(args, device, {"runs": found, "scaler": mistakes.splitlines()}, [*tables, *last])
    common.save_figure(args.out / f"{NAME}.png", draw(found, grads))
    for part in (*tables, mistakes, *last):
        print(f"\n{part}")


if __name__ == "__main__":
    common.run(main)

# Left out: stochastic rounding, which keeps vanishing updates on average; scales for each block of a tensor
# instead of one (MXFP8, NVFP4); the delayed scales of fp8 training.
# Exercise: train with weights in bf16 and stochastic rounding. How close to the fp32 master does it come?
# Next: 06_data_parallel.py puts more than one rank to work.
