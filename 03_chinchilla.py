# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy>=1.26", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""Given a budget of FLOPs, how large should the model be, and on how many tokens should it train?

The compute of real models; the published laws, and where they contradict a popular text; a fit of the law,
with error bars; why Kaplan found N ~ C^0.73 and Chinchilla C^0.50; the study itself in miniature; what to
train if many tokens will be served; a planner. You will see
  - Chinchilla's own points give 18 tokens a parameter at its budget, the constants that it printed give 93;
  - in our runs the best size grows with the budget, and has tens of tokens a parameter;
  - whether embeddings are counted moves the exponent, in our runs as in Kaplan's.

    python 03_chinchilla.py                     trains for about five minutes on two cores, 1.5 GB
    python 03_chinchilla.py --recorded          with the runs recorded in results/: seconds
    python 03_chinchilla.py --quick             every section in twenty seconds, on budgets that tell little
    python 03_chinchilla.py --points FILE.csv   fits the law to your own runs: columns N, D, loss
    python 03_chinchilla.py --plan --params 7B --tokens 140B --gpu H100 --gpus 64
After Ctrl-C the same command goes on: no finished run is repeated.

Notation (example)
    N  parameters, with or without embeddings (7e9)    E, A, B, alpha, beta   of L = E + A/N^alpha + B/D^beta
    D  training tokens (1.4e11)                        a  of N_opt ~ C^a: beta / (alpha + beta) (0.51)
    C  training FLOPs, 6 N D or counted (5.88e21)      L  loss, nats a token (2.17); layers, in d, L
"""

import argparse
import csv
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import common
from common import GPT, BadInput, CheckFailed, Table, V, batch

NAME = Path(__file__).stem
B, T = 8, 64  # sequences in a batch: few, as small budgets need many steps; tokens in a sequence
SIZES = (
    (16, 1), (24, 1), (32, 1), (40, 1), (48, 1), (48, 2), (56, 2), (64, 2), (80, 2), (96, 2), (128, 3)
)  # (d, L)  # fmt: skip
STUDY = {3e11: SIZES[0:7], 1e12: SIZES[1:8], 3e12: SIZES[4:9]}  # counted FLOPs: the sizes tried
QUICK, FULL = {1e10: SIZES[0:5], 3e10: SIZES[0:5]}, STUDY | {1e13: SIZES[6:11]}
SWEEP = tuple((3e11, d, L) for d, L in ((32, 1), (48, 2)))  # where the learning rate is chosen
RATES = (4e-3, 8e-3, 16e-3, 32e-3)
VAL_BATCHES, VAL_SEED = 400, 123  # the same for all runs
HUBER = 1e-3  # of ln L

# N without embeddings, D, FLOPs reported; GPU and GPU-hours where they are reported. From each model's paper.
MODELS = {
    "GPT-3": (174.6e9, 300e9, 3.14e23, None, None),
    "Gopher": (280e9, 300e9, 5.76e23, None, None),
    "Chinchilla": (70e9, 1.4e12, 5.76e23, None, None),
    "PaLM": (540.35e9, 780e9, 2.527e24, None, None),
    "LLaMA-65B": (65.29e9, 1.4e12, None, "A100", 1_022_362),
    "Llama 2 70B": (68.98e9, 2e12, None, "A100", 1_720_320),
    "Llama 3 70B": (70.55e9, 15e12, None, "H100", 7.0e6),
    "Llama 3.1 405B": (405.85e9, 15.6e12, 3.8e25, "H100", 30.84e6),
    "DeepSeek-V3": (37e9, 14.8e12, None, "H800", 2.788e6),
}
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12}  # dense bf16 FLOP/s
MEMORY = {"A100": 80, "H100": 80, "H200": 141, "B200": 192}  # GB
POWER = {"A100": 400, "H100": 700, "H200": 700, "B200": 1000}  # W of the board at most; all from data sheets
GPU_HOURS_A_FAULT = 16_384 * 54 * 24 / 419  # Llama 3 405B: 419 unexpected interruptions in 54 days
WRITE, RESTART = 60.0, 600.0  # s to write a checkpoint and to start again: assumed


# %% 1. C = 6ND
def matmuls(d: int, L: int) -> dict[str, int]:
    """Multiply-adds a token of each matmul: one for each weight; attention scores have no weights."""
    blocks = {"qkv": 3 * d * d, "projection": d * d, "up": 4 * d * d, "down": 4 * d * d}
    return {name: L * n for name, n in blocks.items()} | {"scores": 2 * L * T * d, "head": V * d}


def flops_per_token(d: int, L: int) -> int:
    """Forward 2 for each multiply-add, backward 4: a product for the gradient of either input."""
    return 6 * sum(matmuls(d, L).values())


def non_embedding(d: int, L: int) -> int:
    """N of the blocks: 3 + 1 + 4 + 4 times d^2 a layer."""
    return 12 * L * d * d


def total_parameters(d: int, L: int) -> int:
    """N with the embeddings of tokens and positions and the head."""
    return non_embedding(d, L) + (2 * V + T) * d


def solve(N=None, D=None, C=None) -> tuple[float, float, float]:
    """(N, D, C) of C = 6 N D, from any two of them."""
    N, D = N or C / (6 * D), D or C / (6 * N)
    return N, D, 6 * N * D


def mfu(N: float, D: float, gpu: str, hours: float) -> float:
    """Model FLOPs utilisation: 6ND over what these GPU-hours could have done."""
    return 6 * N * D / (hours * 3600 * PEAK[gpu])


# %% 2. The published laws
@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, nats a token. Hoffmann et al. 2022, eq. 2."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, N, D):
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    @property
    def a(self) -> float:
        """N_opt ~ C^a."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, C: float) -> tuple[float, float]:
        """(N, D) of the lowest loss with 6 N D = C. Hoffmann et al. 2022, eq. 4."""
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        N = G * (C / 6) ** self.a
        return N, C / (6 * N)

    def budget(self, N: float) -> float:
        """The C for which N is optimal."""
        return 6 * (N / self.optimum(6)[0]) ** (1 / self.a)


PRINTED, DIGITS, REFIT = "Hoffmann 2022, printed", "Hoffmann 2022, all digits", "Besiroglu 2024, refit"
LAWS = {
    PRINTED: Law(1.69, 406.4, 410.7, 0.34, 0.28),
    DIGITS: Law(*np.exp([0.5267228, 6.0073404, 6.0179186]).tolist(), 0.33917084, 0.2849083),
    REFIT: Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
}
SARDANA = Law(1.69, 406.4, 410.7, 0.336, 0.283)  # Sardana et al. 2023
PF_DAY = 8.64e19  # FLOPs


def kaplan_N(N):
    """Loss of N non-embedding parameters with data enough, nats a token. Kaplan et al. 2020, eq. 1.1."""
    return (8.8e13 / N) ** 0.076


def kaplan_D(D):
    """Of a large model that stops early on D tokens, eq. 1.2."""
    return (5.4e13 / D) ** 0.095


def kaplan_C(C):
    """Of the best model for C FLOPs, eq. 1.3."""
    return (3.1e8 / (C / PF_DAY)) ** 0.050


def kaplan(N, D):
    """Of N and D together, eq. 1.5, with the constants of its own fit."""
    return ((6.4e13 / N) ** (0.076 / 0.103) + 1.8e13 / D) ** 0.103


# %% 3. The fit (approach 3)
STEPS_OF = (range(0, 26, 5), range(0, 26, 5), (-1, -0.5, 0, 0.5, 1), (0, 0.5, 1, 1.5, 2), (0, 0.5, 1, 1.5, 2))
STARTS = torch.tensor(list(itertools.product(*STEPS_OF)), dtype=torch.float64)  # Hoffmann's 4,500


def minimise(theta, logs, weights, steps: int = 300, tolerance: float = 5e-9):
    """[theta, objective, largest gradient] of the sum of Huber(ln L predicted - ln L), all starts at once.

    theta (S, 5): ln A, ln B, ln E, alpha, beta; logs (3, n): ln N and ln D centred, ln L; weights (S, n) or
    (1, n). Newton's method with the exact Hessian (S, 5, 5), its eigenvalues made positive and raised by mu,
    which shrinks after a step that lowers the objective and grows after one that does not, and is not taken.
    """
    n, S = logs.shape[1], len(theta)
    X = torch.zeros(3, n, 5, dtype=torch.float64)  # the logarithms of the three terms of L are X @ theta
    X[0, :, 0], X[0, :, 3], X[1, :, 1], X[1, :, 4], X[2, :, 2] = 1, -logs[0], 1, -logs[1], 1
    outer = (X[..., :, None] * X[..., None, :]).view(3 * n, 25)

    def evaluate(theta, w):
        z = (theta @ X.view(3 * n, 5).T).view(-1, 3, n)
        top = z.amax(1, keepdim=True)  # shifted by the largest term, the sum of exponentials cannot overflow
        terms = (z - top).exp()
        total = terms.sum(1, keepdim=True)
        r = (top + total.log())[:, 0] - logs[2]
        psi = r.clamp(-HUBER, HUBER)  # the derivative of Huber's function
        return (w * psi * (r - psi / 2)).sum(1), terms / total, r, psi

    def chosen(mask, new, old):
        return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)

    result = [theta.clone(), *torch.full((2, S), math.inf, dtype=torch.float64)]
    active, w, mu = torch.arange(S), weights.expand(S, n), torch.full((S, 1), 1e-3, dtype=torch.float64)
    state = evaluate(theta, w)
    for _ in range(steps):
        f, p, r, psi = state
        J = torch.einsum("skn,knd->snd", p, X)
        gradient = (J.mT @ (w * psi)[..., None])[..., 0]
        for kept, now in zip(result, (theta, f, gradient.abs().amax(1)), strict=True):
            kept[active] = now
        going = ~(gradient.abs().amax(1) <= tolerance)
        if not going.any():
            break
        if not going.all():  # those that have arrived are left alone
            active, theta, w, mu, J, gradient = (t[going] for t in (active, theta, w, mu, J, gradient))
            f, p, r, psi = state = [t[going] for t in state]
        # The sum of w (psi' J J^T + psi (sum of p x x^T - J J^T)), where psi' is 1 within HUBER and 0 beyond.
        H = (J * (w * (r.abs() <= HUBER) - w * psi)[..., None]).mT @ J
        H += ((p * (w * psi)[:, None]).reshape(-1, 3 * n) @ outer).view(-1, 5, 5)
        values, Q = torch.linalg.eigh(H)
        move = -(Q @ ((Q.mT @ gradient[..., None])[..., 0] / (values.abs() + mu))[..., None])[..., 0]
        trial = theta + move * (2 / move.norm(dim=1, keepdim=True)).clamp(max=1)
        tried = evaluate(trial, w)
        better = tried[0] < f
        mu = torch.where(better[:, None], mu / 5, mu * 6).clamp(1e-14, 1e6)
        theta = chosen(better, trial, theta)
        state = [chosen(better, new, old) for new, old in zip(tried, state, strict=True)]
    return result


def fit(N, D, L, starts, weights):
    """(theta, objective, largest gradient) from each start, for runs (N, D) of loss L."""
    logs = torch.tensor(np.log([N, D, L]))
    to_data = torch.eye(5, dtype=torch.float64)
    to_data[3, 0], to_data[4, 1] = centre = logs[:2].mean(1)
    logs[:2] -= centre[:, None]  # so that ln A and alpha no longer move together: a far better condition
    starts, weights = (starts @ to_data.inverse()).split(500), weights.expand(len(starts), -1).split(500)

    def part(start, weight):
        torch.set_num_threads(1)  # a part a core: threads inside it would wait for each other at every line
        return minimise(start, logs, weight)

    with ThreadPoolExecutor(common.usable_cpus()) as pool:
        parts = zip(*pool.map(part, starts, weights), strict=True)
    theta, objective, gradient = map(torch.cat, parts)
    return theta @ to_data, objective, gradient


def law_of(theta) -> Law:
    a, b, e, alpha, beta = theta.tolist()
    return Law(math.exp(e), math.exp(a), math.exp(b), alpha, beta)


def refit(N, D, L, replicates: int, seed: int, needed: float = 0.5) -> dict:
    """The law of these runs, from the best of all starts, and its spread over bootstrap replicates.

    Only fits with a gradient below 1e-8 count. Raises BadInput for runs that cannot identify the law, as when
    less than the share `needed` of the replicates has one.
    """
    N, D, L = (np.asarray(values, dtype=float) for values in (N, D, L))
    if (distinct := len(set(zip(N, D, strict=True)))) < 6:
        raise BadInput(f"{distinct} runs of different N or D cannot fix 5 constants: 6 are the least")
    for name, values in {"N": N, "D": D, "D / N": D / N}.items():
        if np.ptp(np.log(values)) < 0.1:
            raise BadInput(f"{name} is the same in all runs: they cannot tell what N does from what D does")
    theta, objective, gradient = fit(N, D, L, STARTS, torch.ones(1, len(L), dtype=torch.float64))
    objective[~(gradient < 1e-8)] = math.inf
    best = objective.argmin()
    if not objective[best] < math.inf:
        raise CheckFailed("the fit converged from no start")
    counts = np.random.default_rng(seed).multinomial(len(L), np.full(len(L), 1 / len(L)), replicates)
    counts = torch.tensor(counts, dtype=torch.float64)
    again, _, slopes = fit(N, D, L, theta[best].expand(replicates, 5), counts)
    again = again[(slopes < 1e-8) & (again.abs().amax(1) < 200)]  # the rest ran off to infinity
    law = law_of(theta[best])
    if min(law.alpha, law.beta) <= 0:
        raise BadInput(f"alpha {law.alpha:.3g}, beta {law.beta:.3g} fit best: the loss must fall with both")
    if len(again) < max(2, needed * replicates):
        raise BadInput(f"only {len(again)} of {replicates} bootstrap replicates have a law: too few runs")
    sample = np.array([[*asdict(one).values(), one.a] for one in map(law_of, again)])
    low, high = np.percentile(sample, (2.5, 97.5), axis=0).tolist()
    names = [*asdict(law), "a"]
    found = {"objective": objective[best].item(), "gradient": gradient[best].item(), "n": len(L)}
    found |= {"starts": int((gradient < 1e-8).sum()), "replicates": len(again), "of": replicates}
    return {
        "refit": {**asdict(law), "a": law.a, **found},
        "refit_se": dict(zip(names, sample.std(0, ddof=1).tolist(), strict=True)),
        "refit_interval": dict(zip(names, zip(low, high, strict=True), strict=True)),
        "largest": {"N": float(N.max()), "D": float(D.max())},
        "sample": sample[:, 3:5].tolist(),  # alpha, beta
    }


def law_in(found: dict) -> Law:
    """The law of what `refit` returned."""
    return Law(*(found["refit"][name] for name in ("E", "A", "B", "alpha", "beta")))


def read_points(path: Path, drop: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N, D, loss) from columns of those names, or from Model Size, Training FLOP, loss: D = FLOP / 6N.

    Of the latter, the published points, the five highest losses are left out, as in their fit.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
        rows = [{str(k).strip().lower(): v for k, v in row.items()} for row in rows]
        published = bool(rows) and {"model size", "training flop"} <= set(rows[0])
        names = ("model size", "training flop", "loss") if published else ("n", "d", "loss")
        N, D, L = np.array([[float(row[name]) for name in names] for row in rows]).reshape(-1, 3).T
    except KeyError as error:
        found = ", ".join(rows[0]) if rows else "nothing"
        raise BadInput(f"--points {path}: no column {error} among {found}") from None
    except (OSError, UnicodeDecodeError, csv.Error, TypeError, ValueError) as error:
        raise BadInput(f"--points {path}: {getattr(error, 'strerror', None) or error}") from None
    if not (np.isfinite([N, D, L]).all() and (np.array([N, D, L]) > 0).all()):
        raise BadInput(f"--points {path}: N, D and loss must be positive")
    kept = np.argsort(L, kind="stable")[: max(0, len(L) - (5 * published if drop is None else drop))]
    return N[kept], (D / (6 * N) if published else D)[kept], L[kept]


# %% 4. Why Kaplan found 0.73 and Chinchilla 0.50
def apparent_exponent(law: Law, embeddings: bool) -> float:
    """The a of N_opt ~ C^a on models of Kaplan's sizes, if `law` holds for N with embeddings.

    Counting neither the embeddings nor their FLOPs makes small models look smaller and cheaper than they are,
    and the best size seem to grow faster. Pearce & Song 2024: N with embeddings is N + 47491 N^(1/3).
    """
    N = np.logspace(2.9, 9.2, 20)
    total = N + 47_491 * N ** (1 / 3)
    seen, C = (total, np.logspace(14, 20.7, 100)) if embeddings else (N, np.logspace(12.95, 20.7, 100))
    loss = law.loss(total, C[:, None] / (6 * seen))  # (100, 20)
    return float(np.polyfit(np.log(C), np.log(seen[loss.argmin(1)]), 1)[0])


PORIAN = {  # arXiv 2406.19146, on RefinedWeb, each step on top of those before
    "Kaplan's set-up": 0.835,
    "the head's FLOPs counted": 0.706,
    "warm-up in proportion to N": 0.602,
    "cosine decay": 0.571,
    "tuned optimiser, constant rate": 0.497,
}


# %% 5. The study
@dataclass(frozen=True)
class Run:
    """All that shapes a training run: equal runs are not repeated, and an edited recipe is another run."""

    budget: float  # counted FLOPs
    d: int
    L: int
    rate: float
    seed: int
    corpus: str  # sha256
    torch: str = torch.__version__

    @property
    def steps(self) -> int:
        return max(1, round(self.budget / flops_per_token(self.d, self.L) / (B * T)))

    def path(self, folder: Path) -> Path:
        key = json.dumps([asdict(self), RECIPE]).encode()
        return folder / f"{hashlib.sha256(key).hexdigest()[:16]}.json"

    def result(self, folder: Path) -> dict | None:
        """What is kept of it; None if nothing is, or nothing whole."""
        try:
            return json.loads(self.path(folder).read_text())
        except (OSError, ValueError):
            return None


def read_library(seed: int) -> tuple[bytes, str]:
    """(bytes, sha256) of the standard library, packages too, its files shuffled before it is split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    text = b"".join(files[i].read_bytes() for i in np.random.default_rng(seed).permutation(len(files)))
    if len(text) < 2**20:
        raise BadInput(f"{root}: found {len(text):,} bytes of sources, need a megabyte; try --recorded")
    return text, hashlib.sha256(text).hexdigest()


def train(run: Run, train_data, val_data, report=lambda step: None) -> dict:
    """Warm up over a tenth of the steps, then decay to zero, both linearly; validate at the end."""
    torch.manual_seed(run.seed)
    model, rng = GPT(run.d, run.L, T=T), torch.Generator().manual_seed(run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), run.rate, (0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, run.steps + 1):
        warm_up, decay = step / (0.1 * run.steps), (run.steps - step + 1) / (0.9 * run.steps)
        optimizer.param_groups[0]["lr"] = run.rate * min(1, warm_up, decay)
        optimizer.zero_grad()
        model.loss(*batch(train_data, B, T, rng)).backward()
        optimizer.step()
        report(step)
    generator = torch.Generator().manual_seed(VAL_SEED)
    with torch.no_grad():
        losses = [model.loss(*batch(val_data, B, T, generator)) for _ in range(VAL_BATCHES)]
    return asdict(run) | {"D": run.steps * B * T, "loss": torch.stack(losses).mean().item()}


SOURCES = map(inspect.getsource, (train, GPT, common.Block))
RECIPE = hashlib.sha256("".join([repr((B, T, VAL_BATCHES, VAL_SEED)), *SOURCES]).encode()).hexdigest()


def work(queue, folder: Path, seed: int, steps_done) -> None:
    """One process: take the next run until there is none; each is kept as soon as it is finished."""
    torch.set_num_threads(1)
    data = common.split_corpus(read_library(seed)[0], T)
    for index, run in iter(queue.get, None):
        result = train(run, *data, partial(steps_done.__setitem__, index))
        if not math.isfinite(result["loss"]):
            raise CheckFailed(f"d={run.d}, L={run.L} diverged at learning rate {run.rate:g}")
        common.save_json(run.path(folder), result)


def missing(runs: list[Run], folder: Path) -> list[Run]:
    """Those not yet in `folder`, the longest first."""
    return sorted({run for run in runs if not run.result(folder)}, key=lambda run: -run.steps)


def train_all(runs: list[Run], folder: Path, seed: int, bar: tqdm) -> list[dict]:
    """The results of all runs; those that are missing are trained side by side, their FLOPs on the bar."""
    new, before = missing(runs, folder), bar.n
    spawn, jobs = multiprocessing.get_context("spawn"), min(len(new), common.usable_cpus())
    queue, steps_done = spawn.SimpleQueue(), spawn.Array("q", max(1, len(new)), lock=False)
    for item in [*enumerate(new), *[None] * jobs]:
        queue.put(item)

    def tick():
        tokens = [B * T * steps for steps in steps_done[: len(new)]]
        done = sum(n * flops_per_token(run.d, run.L) for n, run in zip(tokens, new, strict=True))
        bar.update(before + done - bar.n)

    processes = {f"training process {i + 1}": (queue, folder, seed, steps_done) for i in range(jobs)}
    common.run_processes(work, processes, tick)
    return [run.result(folder) for run in runs]


def study(plan: dict, sweep, folder: Path, seed: int) -> tuple[list[dict], list[dict]]:
    """(runs of the sweep, runs of the study at the rate whose losses in the sweep are lowest)."""
    new = partial(Run, seed=seed, corpus=read_library(seed)[1])
    tried = [new(C, d, L, rate) for C, d, L in sweep for rate in RATES]
    first = missing(tried, folder)
    with tqdm(unit="FLOP", unit_scale=True, mininterval=1) as bar:
        rest = (C for C in plan for size in plan[C] if (C, *size) not in sweep)
        bar.total = sum(run.budget for run in first) + sum(rest)
        results = train_all(tried, folder, seed, bar)
        best = min(RATES, key=lambda rate: sum(run["loss"] for run in results if run["rate"] == rate))
        runs = [new(C, d, L, best) for C in plan for d, L in plan[C]]
        bar.total = bar.n + sum(run.budget for run in missing(runs, folder))
        if not first:
            print(f"{folder}: {len(missing(runs, folder))} of {len(runs)} runs are missing", file=sys.stderr)
        return results, train_all(runs, folder, seed, bar)


def minimum(x, y) -> float:
    """Where the parabola through the points is lowest; NaN if it has no lowest point."""
    c2, c1, _ = np.polyfit(x - x.mean(), y, 2)
    return float(x.mean() - c1 / (2 * c2)) if c2 > 0 else math.nan


def iso_flop(runs: list[dict], parameters, seed: int, replicates: int = 1000) -> list[dict]:
    """Approach 2: at each budget the N of the lowest loss, by a parabola in ln N, and its 95 % interval.

    `parameters(d, L)` says what N counts. The interval is of fits with the residuals dealt out anew.
    """
    rng, rows = np.random.default_rng(seed), []
    for C in sorted({run["budget"] for run in runs}):
        some = [run for run in runs if run["budget"] == C]
        x = np.log([parameters(run["d"], run["L"]) for run in some])
        y, tokens = (np.array([run[key] for run in some]) for key in ("loss", "D"))
        curve = np.polyval(np.polyfit(x, y, 2), x)
        residuals = (y - curve) * math.sqrt(len(x) / max(1, len(x) - 3))
        sample = np.exp([minimum(x, curve + rng.choice(residuals, len(x))) for _ in range(replicates)])
        if math.isnan(best := minimum(x, y)):
            raise CheckFailed(f"at {C:.0e} FLOPs no size between those tried is best")
        inside, tokens = bool(x.min() < best < x.max()), np.log(tokens)
        log_D = np.interp(best, x, tokens) if inside else np.polyval(np.polyfit(x, tokens, 1), best)
        N, D = math.exp(best), math.exp(log_D)
        rows.append({"C": C, "N_opt": N, "D_opt": D, "tokens_per_param": D / N, "inside": inside})
        rows[-1]["sample"] = sample
    return rows


WAYS = (
    ("N total, C counted", total_parameters, False),
    ("N without embeddings, C counted", non_embedding, False),
    ("N without embeddings, C = 6ND", non_embedding, True),
)


def exponent(minima: list[dict], six: bool) -> tuple[float, float, float]:
    """(a, and its 95 % interval) of N_opt ~ C^a; with `six`, C is 6 N D of the optimum, not counted."""
    C = np.log([6 * m["N_opt"] * m["D_opt"] if six else m["C"] for m in minima])
    a = np.polyfit(C, np.log([m["N_opt"] for m in minima]), 1)[0]
    sample = np.log([m["sample"] for m in minima])
    sample = sample[:, np.isfinite(sample).all(0)]
    return float(a), *map(float, np.percentile(np.polyfit(C, sample, 1)[0], (2.5, 97.5)))


# %% 6. Over-training on purpose
def cheapest(law: Law, loss: float, served: float) -> tuple[float, float]:
    """(N, D) that reach `loss` with the least 6 N D + 2 N served FLOPs. Sardana et al. 2023.

    There alpha A N^-alpha = beta B D^-beta (1 + served / 3D): for a smaller N the left side is larger.
    """

    def tokens(N):
        return (law.B / (loss - law.E - law.A / N**law.alpha)) ** (1 / law.beta)

    low = (law.A / (loss - law.E)) ** (1 / law.alpha) * (1 + 1e-9)  # smaller models never reach the loss
    high = 1e6 * low
    for _ in range(100):
        N = math.sqrt(low * high)
        too_small = served < justifying_tokens(law, N, tokens(N))
        low, high = (N, high) if too_small else (low, N)
    return N, tokens(N)


def justifying_tokens(law: Law, N: float, D: float) -> float:
    """The served tokens for which N and D are the cheapest of their loss: that condition, solved for them."""
    return 3 * D * (law.alpha * law.A * N**-law.alpha / (law.beta * law.B * D**-law.beta) - 1)


# %% 7. The planner
def beyond(N: float, D: float) -> bool:
    """More than ten times the largest model or the most tokens among the points of Besiroglu's refit."""
    return N > 10 * 1.62e10 or D > 10 * 3.18e11


def plan(law_name: str, gpu: str, gpus: int, share: float, price, N=None, D=None, C=None) -> dict:
    """What a run takes. Of N, D, C two are given, or one, and the law chooses the compute-optimal other."""
    law = LAWS[law_name]
    if N and not (D or C):
        C = law.budget(N)
    elif C and not (N or D):
        N, _ = law.optimum(C)
    elif D and not (N or C):
        C = 6 * (D / law.optimum(6)[1]) ** (1 / (1 - law.a))  # D_opt ~ C^(1-a)
    N, D, C = solve(N, D, C)
    mtbf = GPU_HOURS_A_FAULT / gpus * 3600
    interval = math.sqrt(2 * WRITE * mtbf)  # between checkpoints, Young 1974
    goodput = 1 - WRITE / interval - (interval / 2 + RESTART) / mtbf
    if goodput <= 0:
        raise BadInput(f"--gpus {gpus}: a fault every {mtbf:.0f} s leaves no time to get on")
    hours = C / (PEAK[gpu] * share) / 3600 / goodput
    memory = [16 * N, 4 * N + 12 * N / gpus, 2 * N + 14 * N / gpus, 16 * N / gpus]  # unsharded, ZeRO 1, 2, 3
    return {
        "params": N, "tokens": D, "flops": C, "tokens_per_param": D / N, "loss": law.loss(N, D),
        "extrapolated": beyond(N, D),
        "goodput": goodput, "gpu_hours": hours, "days": hours / gpus / 24, "cost": price and price * hours,
        "mwh": hours * POWER[gpu] / 1e6, "memory": memory, "fits": [m <= MEMORY[gpu] * 1e9 for m in memory],
    }  # fmt: skip


# %% 8. What came out
def compute_tables() -> list[Table]:
    """Section 1. Raises CheckFailed if PyTorch counts other FLOPs than the sum over the matmuls."""
    d, L, rows = 192, 4, []
    model, tokens = GPT(d, L, T=T), torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    if (counted := counter.get_total_flops() // T) != (sums := flops_per_token(d, L)):
        raise CheckFailed(f"FLOPs a token: counted {counted}, expected {sums}")
    products = [(name, n, 2 * n, 4 * n) for name, n in matmuls(d, L).items()]
    notes = f"Sum {sums:,}, as PyTorch counts; 6N, without head and scores, is {6 * non_embedding(d, L):,}."
    for name, (N, D, reported, gpu, hours) in MODELS.items():
        used = hours and mfu(N, D, gpu, hours)
        rows.append((name, N / 1e9, D / 1e12, 6 * N * D, reported, gpu, hours, used))
    title, head = f"FLOPs a token, d = {d}, L = {L}:", "|N, 1e9|D, 1e12|6ND|reported|GPU|GPU-hours|MFU"
    return [
        Table(title, "|multiply-adds|forward|backward", "|,|,|,", products, notes),
        Table("real models:", head, "|.2f|.2f|.2e|.2e||,.0f|.1%", rows, corrections()),
    ]


def corrections() -> str:
    """What two popular texts say of compute, and what it is."""
    llama, day, year = 6.3e24 / 400e12, 86400 * PEAK["A100"], 86400 * 365.25  # s; FLOPs of an A100; s
    gpt3, gopher, chinchilla = (6 * N * D for N, D, *_ in list(MODELS.values())[:3])
    return "\n".join([
        f"6.3e24 FLOPs at 400 TFLOP/s: {llama:.1e} GPU-seconds, {llama / 3.6e9:.1f}M H100-hours,"
        f" {llama / 86400 / 16000:.0f} days on 16,000.",
        f"Not a century and a half on one: {llama / year:.0f} years, {6.3e24 / 989e12 / year:.0f} at peak.",
        f"1e23 FLOPs are not 100 A100-days: {1e23 / day:,.0f} at peak, {1e23 / day / 0.4:,.0f} at 40 %.",
        f"7B on 140B tokens: {5.88e21 / day:.0f} A100-days at peak, {5.88e21 / day / 0.4:.0f} at 40 %.",
        f"GPT-3 and Chinchilla are not one compute: {gpt3:.2e}, {chinchilla:.2e}. Gopher: {gopher:.2e}.",
        f"15T tokens for 8B are {15e12 / 8e9:,.0f} a parameter: not 10 but {15e12 / 8e9 / 20:.0f} times 20.",
        f"GPT-4, 1.7T x 13T: {6 * 1.7e12 * 13e12:.1e}, not 1e25; 2e25 of active parameters (estimates).",
        "DeepSeek-V3 trained in FP8: its MFU is against the bf16 peak.",
    ])  # fmt: skip


def law_tables() -> list[Table]:
    """Sections 2 and 4."""
    rows, mixed, sizes = [], [], []
    for name, law in LAWS.items():
        N, D = law.optimum(5.76e23)
        seen = apparent_exponent(law, False), apparent_exponent(law, True)
        rows.append((name, *asdict(law).values(), law.a, N / 1e9, D / N, *seen))
    for name, N, D in (("GPT-3", 175e9, 300e9), ("Chinchilla", 70e9, 1.4e12), ("Llama 3 8B", 8e9, 15e12)):
        loss = LAWS[PRINTED].loss(N, D)
        mixed.append((name, loss - LAWS[PRINTED].E, loss, kaplan(N, D)))
    for N in (1e9, 7e9, 70e9, 405e9):
        mark = " *" if beyond(N, 20 * N) else ""
        sizes.append((f"{N / 1e9:.0f}B{mark}", 20 * N / 1e12, 120 * N * N, LAWS[REFIT].loss(N, 20 * N)))
    head = "|E|A|B|alpha|beta|a|N, 1e9|D/N|a, bare N|a, whole N"
    notes = "N and D/N: the best for 5.76e23 FLOPs. The last two: the exponent that a law shows on models\n"
    notes += "of Kaplan's sizes, N without and with embeddings; he found .73 (Pearce & Song 2024)."
    kaplans = f"Kaplan: L(N=1e9) {kaplan_N(1e9):.3f}, L(D=1e9) {kaplan_D(1e9):.3f},"
    kaplans += f" L(1 PF-day) {kaplan_C(PF_DAY):.3f}; twice the N, {1 - 2**-0.076:.1%} less loss.\n"
    kaplans += "His laws fall for ever, the later ones have a floor, E."
    one, right = math.sqrt(5.88e23 / 6) / 1e9, math.sqrt(5.88e23 / 120) / 1e9
    rule = f"N = D = sqrt(C/6) is 1 token a parameter: {one:.0f}B for 5.88e23. With 20, N = sqrt(C/120):"
    rule += f" {right:.0f}B on {right / 50:.1f}T.\n* extrapolated: more than ten times the data of the law"
    mix_up = "`kaplan_loss` with Chinchilla's constants and without E; in nats a token, not bits a character:"
    return [
        Table("laws:", head, "|.4f|.2f|.2f|.4f|.4f|.3f|.1f|.1f|.2f|.2f", rows, notes),
        Table("from .73 to .50, step by step (Porian et al. 2024):", "|a", "|.3f", list(PORIAN.items())),
        Table(mix_up, "|as printed|with E|Kaplan's law", "|.3f|.3f|.3f", mixed, kaplans),
        Table("20 tokens a parameter:", "|D, 1e12|6ND|loss, Besiroglu", "|.2f|.2e|.3f", sizes, rule),
    ]


def refit_table(title: str, found: dict, C: float) -> Table:
    """Section 3, and what the law says of a budget C."""
    r, rows = found["refit"], []
    for name, se in found["refit_se"].items():
        told = se < 10 * abs(r[name])  # a few replicates far out make the others' spread senseless
        rows.append((name, r[name], se if told else None, *found["refit_interval"][name]))
    N, D = law_in(found).optimum(C)
    notes = f"n = {r['n']}, objective {r['objective']:.7e}, gradient {r['gradient']:.0e}. {r['starts']:,} of"
    notes += f" {len(STARTS):,} starts converged,\n{r['replicates']:,} of {r['of']:,} bootstrap replicates."
    notes += f" Best for {C:.3g} FLOPs: N {N:.3g}, D/N {D / N:.3g}"
    largest = found["largest"]
    far = max(N / largest["N"], D / largest["D"]) > 10
    notes += ", beyond ten times the data: not to be trusted." if far else "."
    A, B = (high / low for low, high in (found["refit_interval"]["A"], found["refit_interval"]["B"]))
    if max(A, B) > 1e6:
        notes += "\nA or B can be anything: these runs do not tell the law."
    elif max(A, B) > 2:
        notes += f"\nA is told to a factor of {A:,.3g}, B of {B:,.3g}: the constants trade off, and only what"
        notes += "\nthey say together, the loss near the data, is told well."
    if r["E"] < 1e-3:
        notes += "\nE is at zero: these runs are too far from a floor to tell it."
    return Table(title, "|value|standard error|2.5 %|97.5 %", "|.6g|.3g|.4g|.4g", rows, notes)


def study_tables(sweep: list[dict], runs: list[dict], found: dict, seed: int) -> tuple[list[Table], dict]:
    """Section 5: (tables, what the JSON has of them)."""
    profiles, best, slopes, rates = [], [], [], []
    for d, L in dict.fromkeys((run["d"], run["L"]) for run in sweep):
        rates.append((f"d={d}, L={L}", *(run["loss"] for run in sweep if (run["d"], run["L"]) == (d, L))))
    minima = iso_flop(runs, total_parameters, seed)
    for m in minima:
        some = [run for run in runs if run["budget"] == m["C"]]
        losses = (f"{total_parameters(run['d'], run['L']) / 1e3:.0f}k {run['loss']:.3f}" for run in some)
        profiles.append((f"{m['C']:.0e}", ", ".join(losses)))
        low, high = np.nanpercentile(m["sample"], (2.5, 97.5)).tolist()
        best.append((f"{m['C']:.0e}", m["N_opt"], low, high, m["D_opt"], m["tokens_per_param"], m["inside"]))
        m |= {"low": low, "high": high}
    for name, parameters, six in WAYS:
        of_way = iso_flop(runs, parameters, seed)
        slopes.append((name, *exponent(of_way, six), *(m["tokens_per_param"] for m in of_way)))
    lowest = [min((r for r in runs if r["budget"] == m["C"]), key=lambda r: r["loss"]) for m in minima]
    N = np.array([total_parameters(r["d"], r["L"]) for r in lowest])
    D = np.array([r["D"] for r in lowest])
    a = np.polyfit(np.log([m["C"] for m in minima]), np.log(N), 1)[0]
    slopes.append(("approach 1: the best runs, N total", float(a), None, None, *(D / N).tolist()))
    law, interval = law_in(found), found["refit_interval"]["a"]
    ratios = [D / N for N, D in (law.optimum(m["C"]) for m in minima)]
    slopes.append(("approach 3: the fit, N total, C = 6ND", law.a, *interval, *ratios))
    ways = [dict(zip(("way", "a", "low", "high"), row, strict=False)) for row in slopes]
    kept = [{key: value for key, value in m.items() if key != "sample"} for m in minima]
    n, ratios = len(minima), "".join(f"|D/N, {m['C']:.0e}" for m in minima)
    tried = "".join(f"|{rate:g}" for rate in RATES)
    lesson = "One seed a run. The intervals of the first three suppose that a profile is a parabola: that\n"
    lesson += "the approaches differ by more says how far to trust them."
    between, widths = "C|N_opt|from|to|D_opt|D/N|between sizes tried", "|,.0f|,.0f|,.0f|,.0f|.1f|"
    return [
        Table(f"loss by learning rate, {sweep[0]['budget']:.0e} FLOPs:", tried, "|.3f" * len(RATES), rates),
        Table(f"loss by N with embeddings, learning rate {runs[0]['rate']:g}:", "C|", "|", profiles),
        Table("approach 2, compute-optimal sizes by parabolas:", between, widths, best),
        Table("N_opt ~ C^a:", f"|a|from|to{ratios}", "|.2f" * 3 + "|.1f" * n, slopes, lesson),
    ], {"isoflop": kept, "exponents": ways}


def serve_table(served: float) -> Table:
    """Section 6."""
    N0, rows = 13e9, []
    D0 = SARDANA.budget(N0) / (6 * N0)
    N1, D1 = cheapest(SARDANA, SARDANA.loss(N0, D0), served)
    for name, N, D in (("compute-optimal", N0, D0), ("cheapest with what it serves", N1, D1)):
        flops = 6 * N * D, 2 * N * served, 6 * N * D + 2 * N * served
        rows.append((name, N / 1e9, D / 1e12, D / N, SARDANA.loss(N, D), *flops))
    ours, theirs = (justifying_tokens(law, 8e9, 15e12) for law in (LAWS[REFIT], SARDANA))
    less = 1 - rows[1][-1] / rows[0][-1]
    notes = f"{less:.1%} fewer FLOPs, by the constants of Sardana et al. 2023. 8B on 15T tokens, 94 times\n"
    notes += f"20 a parameter, is the cheapest of its loss if {theirs:.1e} are served, or {ours:.1e} by\n"
    notes += "Besiroglu; but 15T are beyond ten times the data of either law."
    title = f"over-training on purpose: the loss of a compute-optimal 13B, {served:.3g} tokens served:"
    head = "|N, 1e9|D, 1e12|D/N|loss|training|serving|FLOPs"
    return Table(title, head, "|.2f|.3f|.0f|.3f|.2e|.2e|.2e", rows, notes)


def plan_table(p: dict, args) -> Table:
    """Section 7."""
    extrapolated = ", beyond ten times the data of the law" if p["extrapolated"] else ""
    rows = [
        ("parameters N", f"{p['params']:.3g}"),
        ("tokens D", f"{p['tokens']:.3g}, {p['tokens_per_param']:,.1f} a parameter"),
        ("training FLOPs 6ND", f"{p['flops']:.3g}"),
        (f"loss by {REFIT}", f"{p['loss']:.3f} nats a token{extrapolated}"),
        (f"{args.gpu}-hours at MFU {args.mfu:.3g}, goodput {p['goodput']:.1%}", f"{p['gpu_hours']:,.0f}"),
        (f"days on {args.gpus:,}", f"{p['days']:,.3g}"),
        ("cost", f"{p['cost']:,.0f}" if p["cost"] else "not asked: --price of a GPU-hour"),
        ("energy of the boards, at most", f"{p['mwh']:,.3g} MWh"),
    ]
    stages = ("unsharded", "ZeRO 1", "ZeRO 2", "ZeRO 3")
    for name, size, fits in zip(stages, p["memory"], p["fits"], strict=True):
        verdict = f"{'fits' if fits else 'does not fit'} {MEMORY[args.gpu]} GB"
        rows.append((f"memory a GPU, {name}", f"{size / 1e9:,.3g} GB, {verdict}"))
    notes = "Memory is 16 bytes a parameter, without activations. Goodput: faults as often as Llama 3's,\n"
    notes += "a checkpoint of a minute at Young's interval, ten minutes to start again (both assumed)."
    return Table("the plan:", "|", "|", rows, notes)


def draw_fit(axes, found: dict) -> None:
    """The exponents of the bootstrap replicates, and the ellipse that would hold 95 % if they were normal."""
    alpha, beta = np.array(found["sample"]).T
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 100))
    values, axes_of = np.linalg.eigh(np.cov(alpha, beta))
    ellipse = axes_of @ np.diag(np.sqrt(5.99 * values.clip(0))) @ [circle.real, circle.imag]
    axes.plot(alpha, beta, ".", color="C0", alpha=0.1, ms=3)
    axes.plot(ellipse[0] + alpha.mean(), ellipse[1] + beta.mean(), color="black", lw=1, label="95 %")
    axes.plot(found["refit"]["alpha"], found["refit"]["beta"], "k*", ms=12, label="these runs")
    for marker, (name, law) in zip("sdo", LAWS.items(), strict=True):
        axes.plot(law.alpha, law.beta, marker, label=name)
    axes.set(xlabel="alpha, of N", ylabel="beta, of D", title="The fit of L(N, D): its exponents")
    axes.set_xlim(0, 1.3 * np.percentile(alpha, 99))
    axes.set_ylim(0, 1.3 * np.percentile(beta, 99))
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)


def draw(runs: list[dict], minima: list[dict], found: dict):
    """Loss against size at each budget, and the minima; the best N and D against C; the fit. Or only that."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18 if runs else 6, 5.5), layout="constrained")
    *panels, last = np.atleast_1d(figure.subplots(1, 3 if runs else 1))
    draw_fit(last, found)
    if not runs:
        return figure
    left, right = panels
    for i, m in enumerate(minima):
        some = [run for run in runs if run["budget"] == m["C"]]
        N = np.log([total_parameters(run["d"], run["L"]) for run in some])
        loss, x = [run["loss"] for run in some], np.linspace(N.min(), N.max(), 100)
        curve = np.polyfit(N, loss, 2)
        left.plot(np.exp(N), loss, "o", color=f"C{i}", label=f"{m['C']:.0e} FLOPs")
        left.plot(np.exp(x), np.polyval(curve, x), color=f"C{i}", lw=1)
        left.plot(m["N_opt"], np.polyval(curve, math.log(m["N_opt"])), "*", color="black", ms=12)
    left.set(xscale="log", xlabel="parameters N, with embeddings", ylabel="validation loss (nats a byte)")
    ticks = [t for t in (1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6) if left.get_xlim()[0] < t < left.get_xlim()[1]]
    left.set_xticks(ticks, [f"{t / 1e3:,.0f}k" for t in ticks])
    left.minorticks_off()
    left.set_title("At each budget one size is best (stars)")
    keys = ("C", "N_opt", "D_opt", "low", "high")
    C, N, D, low, high = (np.array([m[key] for m in minima]) for key in keys)
    right.errorbar(C, N, (N - low, high - N), fmt="k*", ms=10, capsize=4, label="N_opt, ours, 95 %")
    right.plot(C, D, "C0s", label="D_opt, ours")
    for a, style, name in ((0.73, ":", "Kaplan, a = 0.73"), (0.5, "--", "Chinchilla, a = 0.50")):
        reach = C / C[len(C) // 2]
        right.plot(C, N[len(C) // 2] * reach**a, "k" + style, label=f"{name}: N ~ C^a")
        right.plot(C, D[len(C) // 2] * reach ** (1 - a), "C0" + style, label="D ~ C^(1-a)")
    right.set(xscale="log", yscale="log", xlabel="training compute C (counted FLOPs)")
    right.set_ylabel("parameters, tokens")
    right.set_title("How they grow with compute")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    return figure


def quantity(text: str) -> float:
    """argparse type: a positive number such as 7e9, 7B or 1.4T."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        value = scale * float(text[:-1] if scale > 1 else text)
    except ValueError:
        value = math.nan
    if not 1e-3 <= value <= 1e30:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number such as 7e9, 7B or 1.4T")
    return value


def share(text: str) -> float:
    """argparse type: a number above 0 and not above 1."""
    if (value := quantity(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1: MFU is a share of the GPU's peak")
    return value


def parse():
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--recorded", action="store_true", help="use the runs in results/ instead of training")
    add("--full", action="store_true", help="a fourth budget, 1e13 FLOPs")
    add("--points", type=Path, metavar="CSV", help="fit the law to the runs in this file")
    add("--drop", type=common.natural, metavar="K", help="leave out the K highest losses of --points")
    add("--inference-tokens", type=quantity, default=2e12, metavar="X", help="to be served (default: 2T)")
    add("--plan", action="store_true", help="plan a run from one or two of --params, --tokens, --flops")
    for name in ("params", "tokens", "flops", "price"):
        add(f"--{name}", type=quantity, metavar="X", help="of a GPU-hour" if name == "price" else None)
    add("--gpu", choices=MEMORY, default="H100")
    add("--gpus", type=common.positive, default=8)
    add("--mfu", type=share, default=0.4, help="default: 0.4")
    args = parser.parse_args()
    given = sum(value is not None for value in (args.params, args.tokens, args.flops))
    if args.plan != (1 <= given <= 2):
        parser.error("--plan goes with one or two of --params, --tokens, --flops")
    if sum((args.plan, bool(args.points), args.recorded, args.full, args.quick and not args.points)) > 1:
        parser.error("--plan, --points, --recorded, --full and --quick exclude each other")
    if args.drop is not None and not args.points:
        parser.error("--drop goes with --points")
    return args


def main():
    args, device, threads = parse(), torch.device("cpu"), common.usable_cpus()
    common.writable(args.out)
    torch.set_num_threads(threads)
    header = common.header(device, "fp32", "small models, on the CPU", threads, args.seed)
    print(header, flush=True)
    results, replicates = {}, 200 if args.quick else 4000
    if args.plan:
        wanted = args.params, args.tokens, args.flops
        results["plan"] = plan(REFIT, args.gpu, args.gpus, args.mfu, args.price, *wanted)
        shown = [plan_table(results["plan"], args)]
    elif args.points:
        N, D, L = read_points(args.points, args.drop)
        results = refit(N, D, L, replicates, args.seed)
        shown = [refit_table(f"the law of {args.points.name}:", results, 5.76e23)]
        common.save_figure(args.out / f"{NAME}.png", draw([], [], results))
    else:
        if args.recorded:
            recorded = Path(__file__).parent / f"results/{NAME}.json"
            if not recorded.exists():
                raise BadInput(f"--recorded: there is no {recorded}")
            recorded = json.loads(recorded.read_text())
            sweep, runs = recorded["sweep"], recorded["runs"]
        else:
            budgets = QUICK if args.quick else FULL if args.full else STUDY
            at = ((1e10, 24, 1),) if args.quick else SWEEP
            sweep, runs = study(budgets, at, common.writable(args.out / NAME), args.seed)
        N, D, L = zip(*((total_parameters(r["d"], r["L"]), r["D"], r["loss"]) for r in runs), strict=True)
        results = refit(N, D, L, replicates, args.seed, needed=0)
        tables, of_study = study_tables(sweep, runs, results, args.seed)
        results |= of_study | {"sweep": sweep, "runs": runs}
        fitted = refit_table("approach 3, on the same runs:", results, results["isoflop"][-1]["C"])
        shown = [*compute_tables(), *law_tables(), *tables, fitted, serve_table(args.inference_tokens)]
        common.save_figure(args.out / f"{NAME}.png", draw(runs, results["isoflop"], results))
    results.pop("sample", None)
    common.save_results(args, device, results, shown)
    for table in shown:
        print(f"\n{table}")


if __name__ == "__main__":
    common.run(main)

# Left out: a learning rate for each size; batch size; more than one seed a run; data that repeats.
# Exercise: fit --points to the recorded runs. Which constants move most without the smallest budget, and why?
# Next: 04_flash_attention.py takes the part of the model whose memory grows with the square of the sequence.
