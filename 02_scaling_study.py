# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy>=1.26", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""Does loss fall as a power law of training compute, and which model size is best for a given budget?

Five byte-level GPTs, 12 thousand to 1.8 million parameters, learn the Python standard library's own source;
validation loss is taken at seven points of each run. You will see
  - at a fixed number of tokens, the bigger model has the lower loss;
  - at a fixed compute budget, the best model is neither the smallest nor the biggest;
  - the frontier, the best loss at each budget, is near a straight line on log-log axes: a power law;
  - C = 6ND misses half of the FLOPs that the smallest model spends.

    python 02_scaling_study.py                    about 2 minutes and 1.5 GB on two cores with bf16 units
    python 02_scaling_study.py --quick            the same in miniature, about ten seconds
    python 02_scaling_study.py --corpus my_texts  your own file or folder
After Ctrl-C the same command goes on from the last checkpoint.

Notation (example)
    B  sequences in a batch (16)     d  width (192)       N  parameters without embeddings and head, 12 L d^2
    T  tokens in a sequence (64)     L  layers (4)        D  training tokens, steps * B * T (1,638,400)
    V  vocabulary: bytes (256)       h  heads (4)         C  training FLOPs, 6 N D unless said to be counted
"""

import hashlib
import io
import json
import math
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import common
from common import GPT, CheckFailed, V, batch

NAME = Path(__file__).stem
B, T = 16, 64  # sequences in a batch, tokens in a sequence
MODELS = ((32, 1), (48, 2), (96, 2), (128, 3), (192, 4))  # (d, L), smallest first
STEPS = 1600  # optimiser steps
CHECKPOINTS = (50, 100, 200, 400, 800, 1200, 1600)  # steps at which validation loss is taken
LEARNING_RATE, WARM_UP, WEIGHT_DECAY = 2e-3, 50, 0.1  # AdamW; linear warm-up in steps, constant after it
VAL_BATCHES, VAL_SEED = 25, 123  # the same validation batches at every checkpoint of every model
BUDGETS = (1e10, 3e10, 1e11, 3e11, 1e12, 3e12)  # FLOPs at which the sizes are compared
MOVED_BOUND = 0.01  # nats by which reduced precision may move a loss of the smallest model


# %% 1. The arithmetic: what a token costs
def non_embedding_parameters(d: int, L: int) -> int:
    """N: a block has 3d^2 (qkv) + d^2 (proj) + 4d^2 (up) + 4d^2 (down) weights. Kaplan et al. 2020, 2.1."""
    return 12 * L * d * d


def flops_per_token(d: int, L: int) -> int:
    """Forward and backward: 2 + 4 FLOPs a weight, for blocks (6N) and head (6Vd); and the attention scores.

    Those have no weights: QK^T and its product with V take 2Td each a layer forward, twice that backward.
    Causality is not exploited, the masked half is computed too.
    """
    return 6 * non_embedding_parameters(d, L) + 6 * V * d + 12 * L * T * d


def counted_flops_per_token(d: int, L: int) -> int:
    """The same, counted by PyTorch over one forward and backward."""
    model, tokens = GPT(d, L), torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    return counter.get_total_flops() // T


# %% 2. One model: train, validate, save, go on
@dataclass(frozen=True)
class Run:
    """All that shapes one model's numbers: equal runs on one machine give equal losses, bit for bit."""

    d: int
    L: int
    threads: int
    halves: bool  # two half batches a step, side by side if cores are idle, else in turn: the same bits
    checkpoints: tuple[int, ...]  # steps; training ends at the last
    val_batches: int
    seed: int
    precision: str
    device: str
    corpus: str  # sha256
    torch: str = torch.__version__

    def path(self, folder: Path) -> Path:
        """Where its state is kept. The name holds a hash of the arguments: others never meet this file."""
        key = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:10]
        return folder / f"d{self.d}_L{self.L}_{key}.pt"


def save_state(path: Path, state: dict) -> None:
    """A digest in front tells a whole file from a damaged one."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    common.write(path, hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())


def load_state(path: Path) -> dict:
    """The state at the last checkpoint, or that of a run not begun. A damaged file is set aside."""
    fresh = {"step": 0, "val_losses": [], "seconds": 0.0, "peak": 0.0}
    if not path.exists():
        return fresh
    blob = path.read_bytes()
    if hashlib.sha256(blob[32:]).digest() != blob[:32]:
        path.replace(path.with_suffix(".damaged"))
        print(f"{path} is damaged: set aside as .damaged, this model starts afresh", file=sys.stderr)
        return fresh
    return torch.load(io.BytesIO(blob[32:]), weights_only=True)


@torch.no_grad()
def validation_loss(model: GPT, data: torch.Tensor, run: Run) -> float:
    """Nats a token, over the same windows at every call."""
    generator = torch.Generator().manual_seed(VAL_SEED)
    with common.autocast(run.precision, data.device):
        losses = [model.loss(*batch(data, B, T, generator)).float() for _ in range(run.val_batches)]
    return torch.stack(losses).mean().item()


def matmul_peak(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matmul in this precision, on the threads that this process now has."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    product = torch.empty_like(a)
    return 2 * n**3 / common.measure(lambda: torch.mm(a, a, out=product), device)


def train(run: Run, path: Path, train_data, val_data, report=lambda step: None, idle=lambda: False) -> dict:
    """Train from where `path` stands to the last checkpoint, saving the state at each; return the last.

    `report(step)` is called after each step; `idle()` says if there are cores for a second half batch.
    """
    state = load_state(path)
    if state["step"] == run.checkpoints[-1]:
        return state
    device = torch.device(run.device)
    torch.set_num_threads(run.threads)
    common.set_precision(run.precision, device)
    state["peak"] = matmul_peak(device, run.precision)

    torch.manual_seed(run.seed)
    model = GPT(run.d, run.L).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    rng = torch.Generator().manual_seed(run.seed)  # all models draw the same batches
    if state["step"]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.set_state(state["rng"])

    def gradients(x, y):
        torch.set_num_threads(run.threads)  # a new Python thread starts with all cores
        return torch.autograd.grad(model.loss(x, y), parameters)

    pool, start = ThreadPoolExecutor(2), time.perf_counter()
    for step in range(state["step"] + 1, run.checkpoints[-1] + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / WARM_UP)
        x, y = batch(train_data, B, T, rng)  # (B, T) each
        if run.halves:
            both = (pool.map if idle() else map)(gradients, x.chunk(2), y.chunk(2))
            for parameter, a, b in zip(parameters, *both, strict=True):
                parameter.grad = (a + b) / 2
        else:
            with common.autocast(run.precision, device):
                loss = model.loss(x, y)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        report(step)
        if step not in run.checkpoints:
            continue

        parameters[0].sum().item()  # a GPU must have done the work before the clock is read
        state |= {"step": step, "seconds": state["seconds"] + time.perf_counter() - start}
        state["val_losses"].append(validation_loss(model, val_data, run))
        if not math.isfinite(state["val_losses"][-1]):
            raise CheckFailed(f"d={run.d}, L={run.L} diverged: its loss at step {step} is not a number")
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng.get_state()}
        if step == run.checkpoints[-1]:  # what is finished needs no weights to go on from
            state = {key: state[key] for key in ("step", "val_losses", "seconds", "peak")}
        save_state(path, state)
        start = time.perf_counter()
    pool.shutdown()
    return state


# %% 3. All of them side by side
def threads_of_models(cpus: int, jobs: int | None = None) -> list[int]:
    """Threads of the processes that train at the same time, for the largest models first.

    Each costs about half of the next larger, so each process takes half of the cores left, the last one all:
    1 core [1], 2 cores [1, 1], 4 cores [2, 1, 1], 8 cores [4, 2, 1, 1]. Small models do not fill two threads.
    """
    jobs = jobs or min(len(MODELS), cpus.bit_length())
    threads = []
    for left in range(jobs, 0, -1):
        threads.append(max(1, cpus if left == 1 else (cpus + 1) // 2))
        cpus -= threads[-1]
    return threads


def work(queue, finished, corpus: Path | None, device: str, steps_done, leavers) -> None:
    """One process: take the next run until there is none, and leave its cores to the others."""
    text, _ = common.read_corpus(corpus)
    train_data, val_data = (data.to(device) for data in common.split_corpus(text, T))
    for index, run, path in iter(queue.get, None):
        report = partial(steps_done.__setitem__, index)
        state = train(run, path, train_data, val_data, report, idle=lambda: leavers.value > 0)
        finished.put((index, state))
    leavers.value += 1


def train_all(runs: list[Run], folder: Path, corpus: Path | None, jobs: int) -> list[dict]:
    """The last state of each run, in the order given; one progress bar over the FLOPs of them all."""
    paths = [run.path(folder) for run in runs]
    done, ends = [load_state(path)["step"] for path in paths], [run.checkpoints[-1] for run in runs]
    if any(done):
        print(f"going on with {folder}: {sum(done):,} of {sum(ends):,} steps are done", file=sys.stderr)
    elif any(folder.glob("*.pt")):
        print(f"the work in {folder} has other arguments: kept, and starting afresh", file=sys.stderr)

    spawn = multiprocessing.get_context("spawn")
    queue, finished = spawn.SimpleQueue(), spawn.SimpleQueue()
    for job in zip(range(len(runs)), runs, paths, strict=True):
        queue.put(job)
    for _ in range(jobs):
        queue.put(None)
    steps_done, leavers = spawn.Array("q", done, lock=False), spawn.Value("q", 0, lock=False)
    step_flops = [B * T * flops_per_token(run.d, run.L) for run in runs]

    def flops(steps):
        return int(np.dot(step_flops, steps))

    with tqdm(total=flops(ends), initial=flops(done), unit="FLOP", unit_scale=True, mininterval=1) as bar:
        arguments = (queue, finished, corpus, runs[0].device, steps_done, leavers)
        processes = {f"training process {i + 1}": arguments for i in range(jobs)}
        common.run_processes(work, processes, tick=lambda: bar.update(flops(steps_done) - bar.n))
    states = dict(finished.get() for _ in runs)
    return [states[index] for index in range(len(runs))]


# %% 4. The compute frontier and its power law
def compute_frontier(points) -> list[tuple[float, float]]:
    """Of (C, loss) points, those whose loss is below that of all cheaper ones, cheapest first."""
    frontier = []
    for C, loss in sorted(points):
        if not frontier or loss < frontier[-1][1]:
            frontier.append((C, loss))
    return frontier


def student_t(freedom: int) -> float:
    """The t for which 95 % of Student's distribution is within +-t: its density, summed from 0 to 0.475."""
    t, dt = np.linspace(0, 15, 300_001, retstep=True)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    mass = np.cumsum(scale * dt * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)) - scale * dt / 2
    return float(t[np.searchsorted(mass, 0.475)])


def fit_power_law(points) -> tuple[float, float, tuple[float, float]]:
    """(slope, ln a, 95 % interval of the slope) of L = a C^slope, by least squares on logarithms.

    The interval is slope +- t * standard error, with Student's t for n - 2 degrees of freedom.
    Raises CheckFailed for fewer than three points and for losses without a logarithm.
    """
    if len(points) < 3 or min(loss for _, loss in points) <= 0:
        raise CheckFailed(f"a frontier of {len(points)} points has no slope with an interval: more --steps?")
    x, y = np.log(points).T
    dx = x - x.mean()
    slope = dx @ y / (dx @ dx)
    intercept = y.mean() - slope * x.mean()
    residuals = y - intercept - slope * x
    half = student_t(len(x) - 2) * math.sqrt(residuals @ residuals / (len(x) - 2) / (dx @ dx))
    return float(slope), float(intercept), (float(slope - half), float(slope + half))


# %% 5. The compute-optimal size
def loss_at(curve, C: float) -> float | None:
    """Loss at budget C on a curve of (C, loss), linear in log C between its points; None beyond its ends."""
    if not curve[0][0] <= C <= curve[-1][0]:
        return None
    return float(np.interp(math.log(C), np.log([c for c, _ in curve]), [loss for _, loss in curve]))


def compute_optimal(curves: dict[int, list]) -> list[dict]:
    """For each budget that a curve of {N: [(C, loss)]} reaches: the N of the lowest loss, and D = C / 6N."""
    rows = []
    for C in BUDGETS:
        losses = {N: loss for N, curve in curves.items() if (loss := loss_at(curve, C)) is not None}
        if losses:
            N = min(losses, key=losses.get)
            D = C / (6 * N)
            rows.append({"C": C, "N": N, "D": D, "tokens_per_param": D / N, "val_losses": losses})
    return rows


# %% 6. What came out
def analyse(runs: list[Run], states: list[dict]) -> dict:
    """The results as the JSON has them. Raises CheckFailed if the FLOPs counted are not those expected."""
    models = []
    for run, state in zip(runs, states, strict=True):
        N, counted = non_embedding_parameters(run.d, run.L), counted_flops_per_token(run.d, run.L)
        if counted != (expected := flops_per_token(run.d, run.L)):
            raise CheckFailed(f"d={run.d}, L={run.L}: expected {expected} FLOPs a token, counted {counted}")
        tokens = [step * B * T for step in run.checkpoints]
        points = zip(run.checkpoints, tokens, state["val_losses"], strict=True)
        rate = counted * tokens[-1] / state["seconds"]
        peak = max(s["peak"] for r, s in zip(runs, states, strict=True) if r.threads == run.threads)
        if rate > peak:
            raise CheckFailed(f"d={run.d}, L={run.L}: {rate:.3g} FLOP/s beat the matmul peak, {peak:.3g}")
        model = {"N": N, "d": run.d, "L": run.L, "counted_flops_per_token": counted}
        model |= {"threads": run.threads, "halves": run.halves, "flops_per_second": rate, "matmul_peak": peak}
        model["checkpoints"] = [
            {"step": s, "C": 6 * N * D, "D": D, "val_loss": loss} for s, D, loss in points
        ]
        models.append(model)
    curves = {m["N"]: [(c["C"], c["val_loss"]) for c in m["checkpoints"]] for m in models}
    points = compute_frontier(point for curve in curves.values() for point in curve)
    slope, intercept, interval = fit_power_law(points)
    frontier = {"slope": slope, "ci95": interval, "intercept": intercept, "points": points}
    return {"runs": models, "frontier": frontier, "optimal": compute_optimal(curves)}


def show(results: dict) -> None:
    """The tables, in the order of the sections above."""
    for m in results["runs"]:
        losses = "  ".join(f"{c['val_loss']:.2f}" for c in m["checkpoints"])
        print(f"  N={m['N']:>9,}: val loss {losses}   (after {m['checkpoints'][-1]['D']:,} tokens)")
    print(f"  (trained again in fp32, the smallest model's first losses move by {results['moved']:.4f})")

    print("\nFLOPs a token, counted against 6N; GFLOP/s reached against those of a large matmul:")
    print("            N     counted          6N  ratio  reached  matmul  share  threads")
    for m in results["runs"]:
        N, counted, rate, peak = m["N"], m["counted_flops_per_token"], m["flops_per_second"], m["matmul_peak"]
        print(f"    {N:>9,}  {counted:>10,}  {6 * N:>10,}  {counted / 6 / N:>5.2f}", end="")
        print(f"  {rate / 1e9:>7,.0f}  {peak / 1e9:>6,.0f}  {rate / peak:>5.0%}  {m['threads']:>7}", end="")
        print(" (twice as many once others are done)" if m["halves"] else "")
    print("  6N leaves out the head (6Vd) and the attention scores (12LTd), which grow with d while N grows")
    print("  with d^2: the smaller the model, the larger their share. Small matmuls also fill a core less.")

    slope, (low, high), points = (results["frontier"][key] for key in ("slope", "ci95", "points"))
    print(f"\ncompute frontier: {len(points)} points, fitted L ~ C^{slope:.3f}", end="")
    print(f"   (95 % interval {low:.3f} to {high:.3f})")
    print("  Least squares on logarithms, slope +- Student's t x its standard error, as if the points were")
    print("  independent. Those of one curve are not, and another seed or corpus can move the slope by more.")
    print("compute-optimal model size at fixed budgets:")
    for row in results["optimal"]:
        losses = "  ".join(f"{N:>7,}:{loss:.2f}" for N, loss in row["val_losses"].items())
        print(f"  C={row['C']:.0e}: best N = {row['N']:>9,} (D = {row['D']:>10,.0f} tokens,", end="")
        print(f" {row['tokens_per_param']:5.1f} tokens/param)   [{losses}]")
    sizes = [row["N"] for row in results["optimal"]]
    print(f"  The best size {'grows' if sizes == sorted(sizes) else 'does not always grow'} with the budget.")
    print("  Do not expect Chinchilla's 20 tokens/param: one learning rate serves all sizes, without decay,")
    print("  and the batch is too large for the small budgets.")


def draw(models: list[dict], frontier: dict):
    """Loss against compute on log-log axes: a curve a model, the frontier, its fit."""
    import matplotlib.figure  # here: the training processes import this file too, and draw nothing

    with matplotlib.rc_context({"font.size": 14, "lines.linewidth": 2.2}):
        figure = matplotlib.figure.Figure(figsize=(10, 6.2), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log")
        for m, shade in zip(models, ("#7fb8dd", "#5aa0d0", "#3a86c0", "#1c66a8", "#08306b"), strict=True):
            curve = np.array([(c["C"], c["val_loss"]) for c in m["checkpoints"]])
            axes.plot(*curve.T, "o-", color=shade)
            axes.annotate(f"N = {m['N']:,}", curve[0], (0, 9), textcoords="offset points", color=shade)
        points, slope = np.array(frontier["points"]), frontier["slope"]
        axes.plot(*points.T, "o", ms=11, mfc="none", mew=1.8, color="tab:red", label="best loss so far")
        C = points[[0, -1], 0]
        law = rf"fit: $L \propto C^{{{slope:.3f}}}$"
        axes.plot(C, math.exp(frontier["intercept"]) * C**slope, "--", color="tab:red", label=law)
        axes.margins(y=0.12)
        low, high = axes.get_ylim()
        ticks = [t for t in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6) if low <= t <= high]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set(xlabel="training compute C = 6ND (FLOPs)", ylabel="validation loss (nats a byte)")
        axes.set_title("The best loss for a budget falls as a power of compute")
        axes.grid(alpha=0.25)
        axes.legend(loc="upper right", frameon=False)
    return figure


def main():
    parser = common.Parser(__doc__)
    parser.add_argument("--steps", type=common.positive, help=f"optimiser steps a model (default: {STEPS})")
    parser.add_argument("--jobs", type=common.positive, help="models at once (default: from the cores)")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "tf32", "bf16"))
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="a file or a folder of your own")
    args = parser.parse_args()
    began = time.perf_counter()
    text, description = common.read_corpus(args.corpus)
    common.split_corpus(text, T)  # one that is too short is refused before anything is written
    device, cpus = common.choose_device(args.device), common.usable_cpus()
    threads = threads_of_models(cpus, args.jobs or (1 if device.type == "cuda" else None))
    folder = common.writable(common.writable(args.out) / NAME)
    precision, reason = common.choose_precision(args.precision, device)
    print(common.header(device, precision, reason, sum(threads), args.seed))
    print(f"\ncorpus: {len(text):,} byte tokens of {description}", flush=True)

    steps, val_batches = args.steps or (40 if args.quick else STEPS), 5 if args.quick else VAL_BATCHES
    checkpoints = tuple(sorted({max(1, round(c * steps / STEPS)) for c in CHECKPOINTS}))
    same = (checkpoints, val_batches, args.seed, precision, device.type, hashlib.sha256(text).hexdigest())
    # The largest model outlasts the others, but not on a matrix unit, where half batches are slow besides.
    halves = [len(threads) > 1 and precision != "bf16"] + [False] * 4
    threads_of = [*threads, *threads[-1:] * 4]
    plan = [Run(d, L, threads_of[i], halves[i], *same) for i, (d, L) in enumerate(MODELS[::-1])]
    exact = replace(plan[-1], precision="fp32", checkpoints=checkpoints[:3])  # what does the precision move?
    *states, reference = train_all([*plan, exact], folder, args.corpus, len(threads))

    results = analyse(plan[::-1], states[::-1])
    pairs = zip(states[-1]["val_losses"], reference["val_losses"], strict=False)
    results["moved"] = moved = max(abs(a - b) for a, b in pairs)
    results |= {"seconds": time.perf_counter() - began, "machine": common.machine(device)}
    results["args"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    common.save_json(args.out / f"{NAME}.json", results)
    common.save_figure(args.out / f"{NAME}.png", draw(results["runs"], results["frontier"]))
    show(results)
    if moved > MOVED_BOUND:
        raise CheckFailed(f"{precision} moved a loss by {moved:.4f}, not {MOVED_BOUND} at most: use fp32")


if __name__ == "__main__":
    common.run(main)

# Left out: learning rates tuned for each size and their decay, without which the best size comes out too
# large; more than one seed; a fit of L(N, D).
# Exercise: give the two smallest models four times the learning rate. Where does the frontier go, and what
# becomes of the tokens per parameter at 1e11 FLOPs?
