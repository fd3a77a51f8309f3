# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""How do several ranks train one model, and why is that the same as one rank with the whole batch?

Each rank computes the gradient of its own shard of the batch; an all-reduce adds them up, so that every rank
takes the same step. You will see
  - averaged gradients of four ranks equal those of one big batch, to the rounding of float32;
  - a ring all-reduce by hand, who holds what after each step, and 2(n-1)/n of the buffer sent by each rank;
  - one all-reduce a parameter, one for all, and DistributedDataParallel, whose buckets leave during backward;
  - four ways to get a different gradient without an error message;
  - 50 steps on all ranks and on one follow the same losses, and what 1, 2, 4 ranks gain on this machine.

    python 06_data_parallel.py                                        four ranks: half a minute, 2.5 GB
    python 06_data_parallel.py --quick                                the same in miniature
    torchrun --standalone --nproc-per-node 4 06_data_parallel.py      in torchrun's ranks
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 2 06_data_parallel.py

Notation (example)
    world  ranks, n in formulas (4)     B  sequences in the whole batch, 4 a rank (16)
    rank   this one (0 to 3)            T  tokens in a sequence (64)
"""

import copy
import os
import string
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import common
from common import GPT, CheckFailed, Table, batch

NAME = Path(__file__).stem
PER_RANK, T = 4, 64  # sequences of a rank, tokens of a sequence
SMALL, LARGE = (
    (48, 2),
    ((192, 4), (128, 2)),
)  # (d, L): the source's 84,288 parameters; more for what takes time
STEPS, LEARNING_RATE = 50, 2e-3  # of the training runs, AdamW
RING_SIZES = (1001, 84_288, 4_194_304)  # numbers: ragged, the source's gradient, 16 MiB
BUCKET = 1  # MiB: DistributedDataParallel's default of 25 would hold all of our gradient in one bucket
MICRO_STEPS = 4  # micro-batches whose gradients are accumulated
NAMES = string.digits + string.ascii_letters  # of the ranks, in the picture of the ring
EPS = torch.finfo(torch.float32).eps
ERROR_BOUND = 1e-5  # of a gradient, over its largest value: rounding gives 1e-7, a wrong factor 1e-1
LOSS_BOUND = 1e-5  # nats: a loss near 5 is rounded by 5e-7, and the steps carry that on


# %% 1. Averaged gradients are those of the big batch
def check(name: str, got: float, bound: float) -> None:
    """Raises CheckFailed if `got` is above its bound, or not a number."""
    if not got <= bound:
        raise CheckFailed(f"{name}: {got:.1e} away, expected {bound:.0e} at most")


def relative_error(gradient, expected) -> float:
    """The largest difference, over the largest value expected."""
    return ((gradient - expected).abs().max() / expected.abs().max()).item()


def flat_gradient(model) -> torch.Tensor:
    """All gradients in one row; a parameter without one counts as zeros, so that all ranks send as much."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def shard(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows: ragged if they do not divide, and maybe none."""
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


def big_batch_gradient(model, x, y) -> torch.Tensor:
    """On one rank, with every sequence: what the ranks should get together."""
    model = copy.deepcopy(model)
    model.loss(x, y).backward()
    return flat_gradient(model)


def all_reduce(tensor: torch.Tensor, log: list) -> None:
    """The sum over all ranks, in place; (bytes, time at which it left) goes to `log`."""
    log.append((tensor.nbytes, time.perf_counter()))
    dist.all_reduce(tensor)  # the sum: every backend has that, and not every one the mean


def average_gradients(model, log: list) -> None:
    """The obvious way: all-reduce each gradient, and divide."""
    for parameter in model.parameters():
        all_reduce(parameter.grad, log)
        parameter.grad /= dist.get_world_size()


def equal_shards(model, x, y) -> str:
    """The source's check, and its line."""
    ours, expected = copy.deepcopy(model), big_batch_gradient(model, x, y)
    ours.loss(shard(x), shard(y)).backward()
    average_gradients(ours, [])
    difference = (flat_gradient(ours) - expected).abs().max().item()
    # The same products added in another order: a few roundings of the largest value.
    bound = 16 * EPS * expected.abs().max().item()
    check("gradient of equal shards", difference, bound)
    line = f"data parallel on {dist.get_world_size()} processes: max |grad difference| vs single big batch"
    counted = f"{expected.numel():,} gradient values"
    return f"{line} = {difference:.2e} over {counted}\n  (16 roundings of the largest value: {bound:.2e})"


# %% 2. A ring all-reduce
def chunk_bounds(n: int, world: int) -> list[tuple[int, int]]:
    """`world` pieces of n numbers that differ by one at most; some are empty if n < world."""
    return [(n * r // world, n * (r + 1) // world) for r in range(world)]


def ring_all_reduce(buffer: torch.Tensor, after_step=lambda: None) -> int:
    """Add up `buffer` over all ranks, in place; return the bytes that this rank sent. Patarasuk & Yuan 2009.

    Each step sends one chunk to the right and receives one from the left. After world - 1 steps each rank has
    the whole sum of one chunk (reduce-scatter); after as many again, of every chunk (all-gather). Raises
    ValueError for a buffer that is not contiguous: sent as it is, its bytes would arrive in another order.
    """
    if not buffer.is_contiguous():
        raise ValueError("ring_all_reduce needs a contiguous buffer: call .contiguous() and keep the result")
    rank, world, flat = dist.get_rank(), dist.get_world_size(), buffer.view(-1)
    chunks = [flat[start:end] for start, end in chunk_bounds(len(flat), world)]
    inbox, sent = torch.empty_like(chunks[-1]), 0  # the last chunk is the longest
    for step in range(2 * (world - 1)):
        leaving, coming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        reducing = step < world - 1
        arriving = inbox[: len(coming)] if reducing else coming
        # Start both, then wait: ranks that all send first, and block until that is done, wait forever.
        transfers = [
            dist.P2POp(dist.isend, leaving, (rank + 1) % world),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % world),
        ]
        transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
        for request in dist.batch_isend_irecv(transfers) if transfers else ():
            request.wait()
        sent += leaving.nbytes
        if reducing:
            coming += arriving
        after_step()
    return sent


def who_holds_what(device) -> list[list[list[str]]]:
    """[state][rank][chunk]: the ranks whose number is in that sum, from a ring run on the number 2^rank."""
    rank, world, states = dist.get_rank(), dist.get_world_size(), []
    buffer = torch.full((world,), 2.0**rank, dtype=torch.float64, device=device)

    def snapshot():
        everyone = [torch.empty_like(buffer) for _ in range(world)]
        dist.all_gather(everyone, buffer)
        sums = torch.stack(everyone).long().tolist()
        states.append(
            [["".join(NAMES[r % 62] for r in range(world) if s >> r & 1) for s in row] for row in sums]
        )

    snapshot()
    ring_all_reduce(buffer, snapshot)
    return states


def picture(states) -> str:
    """That as text: a block a state, a line a rank, a column a chunk; 03 is the sum of ranks 0 and 3."""
    world, lines = len(states[0]), ["who holds what in a ring:"]
    width = world * (world + 1) + 2
    for first in range(0, len(states), world):
        block = range(first, min(first + world, len(states)))
        lines.append("          " + "".join(f"{f'step {i}' if i else 'start':<{width}}" for i in block))
        for rank in range(world):
            rows = (" ".join(held.rjust(world) for held in states[i][rank]) for i in block)
            lines.append(f"  rank {rank}  " + "".join(row.ljust(width) for row in rows))
    return "\n".join(line.rstrip() for line in lines)


def seconds(function, device, group=None, repeats: int = 7) -> float:
    """Median over the calls, after one of warm-up, of the time that the slowest rank of the group took."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier(group)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times = torch.tensor(times, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return times[1:].median().item()


def ring_against_library(sizes, device, seed: int) -> Table:
    """Sums, bytes and time for float32 buffers of these many numbers. Raises CheckFailed."""
    rank, world, rows = dist.get_rank(), dist.get_world_size(), []
    for n in sizes:
        buffer = torch.randn(n, generator=torch.Generator().manual_seed(seed + rank)).to(device)
        exact, size, ours, library = buffer.double(), buffer.abs(), buffer.clone(), buffer.clone()
        for tensor in (exact, size, library):
            dist.all_reduce(tensor)
        sent = torch.tensor(ring_all_reduce(ours), device=device)
        dist.all_reduce(sent)
        bound = world * EPS * size  # world - 1 additions, in any order
        check(f"ring of {n} against float64", ((ours - exact).abs() - bound).max().item(), 0)
        check(f"ring of {n} against the library", ((ours - library).abs() - 2 * bound).max().item(), 0)
        expected = 2 * (world - 1) * buffer.nbytes
        check(f"bytes of a ring of {n}", abs(sent.item() - expected), 0)
        ring = 1e3 * seconds(lambda ours=ours: ring_all_reduce(ours), device)
        theirs = 1e3 * seconds(lambda library=library: dist.all_reduce(library), device)
        rows.append((n, buffer.nbytes, sent.item() / world, expected / world, ring, theirs, ring / theirs))
    title = f"a ring by hand; a rank sends 2 (n-1)/n = {2 * (world - 1) / world:.4g} times the buffer:"
    head = "numbers|bytes|sent, mean of ranks|predicted|ring, ms|library, ms|ring/library"
    return Table(title, head, ",|,|,.1f|,.1f|.2f|.2f|.2f", rows)


# %% 3. One all-reduce a parameter, one for all, and buckets that leave during backward
def average_gradients_flat(model, log: list) -> None:
    """One all-reduce: all gradients go out in one row, and their means back to their places."""
    row, parameters = flat_gradient(model), list(model.parameters())
    all_reduce(row, log)
    row /= dist.get_world_size()
    for parameter, mean in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = mean.view_as(parameter)


def distributed(model, log: list) -> DistributedDataParallel:
    """A copy of the model, wrapped; its all-reduces are put down in `log`."""

    def hook(log, bucket):
        log.append((bucket.buffer().nbytes, time.perf_counter()))
        return allreduce_hook(None, bucket)  # what it does without a hook: divide, all-reduce, do not wait

    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=BUCKET)
    wrapped.register_comm_hook(log, hook)
    return wrapped


def loss_of(model, x, y, reduction: str = "mean") -> torch.Tensor:
    """GPT.loss, through the forward of what may be wrapped; -100 in y is padding."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def ways_to_average(model, x, y, device) -> Table:
    """A step's gradient averaged in three ways: counted, timed, and held against the big batch's."""
    expected, x, y, log, rows = big_batch_gradient(model, x, y), shard(x), shard(y), [], []
    plain, wrapped = copy.deepcopy(model), distributed(model, log)
    ways = {
        "no all-reduce": (plain, lambda: None),
        "an all-reduce a parameter": (plain, lambda: average_gradients(plain, log)),
        "one all-reduce for all": (plain, lambda: average_gradients_flat(plain, log)),
        "DistributedDataParallel": (wrapped, lambda: None),  # averages during backward
    }
    for name, (trained, average) in ways.items():

        def step(trained=trained, average=average):
            trained.zero_grad()
            log[:] = [(0, time.perf_counter())]
            loss_of(trained, x, y).backward()
            average()

        ms = 1e3 * seconds(step, device)
        (_, start), *left = log
        error = relative_error(flat_gradient(trained), expected) if left else None
        check(name, error or 0, ERROR_BOUND)
        alone = rows[0][3] if rows else ms
        rows.append((name, len(left), sum(size for size, _ in left) / 1e6, ms, ms - alone, error))
    times = ", ".join(f"{1e3 * (at - start):.0f}" for _, at in left)
    notes = f"DDP's buckets left {times} ms after it began, the last with backward's last gradient."
    if device.type == "cpu":
        notes += "\nOn shared cores that gains little: none is idle that could send while the others compute."
    title, head = (
        "averaging the gradient of a larger model:",
        "|all-reduces|MB|ms a step|for averaging, ms|error",
    )
    return Table(title, head, "||.2f|.1f|.1f|.0e", rows, notes)


# %% 4. Traps: another gradient, and no error message
def token_weighted_gradient(model, x, y) -> torch.Tensor:
    """Of the mean over all tokens: add up losses, divide by the tokens of all ranks, add up gradients."""
    model, tokens = copy.deepcopy(model), (y != -100).sum()
    dist.all_reduce(tokens)
    (loss_of(model, x, y, "sum") / tokens).backward()
    row = flat_gradient(model)
    dist.all_reduce(row)
    return row


def mean_of_means_gradient(model, x, y) -> torch.Tensor:
    """Of the mean over ranks of the mean over their tokens: what averaging gives."""
    model = copy.deepcopy(model)
    loss_of(model, x, y).backward()
    average_gradients_flat(model, [])
    return flat_gradient(model)


def accumulate(model, x, y, way: str) -> tuple[torch.Tensor, int]:
    """(gradient, all-reduces) of MICRO_STEPS micro-batches; it is enough to reduce after the last."""
    wrapped = distributed(model, log := [])
    for i, piece in enumerate(zip(x.chunk(MICRO_STEPS), y.chunk(MICRO_STEPS), strict=True)):
        last = i == MICRO_STEPS - 1
        quiet = nullcontext if last else wrapped.no_sync
        with quiet() if way == "around both" else nullcontext():
            loss = loss_of(wrapped, *piece) / MICRO_STEPS  # it is in here that DDP decides
            if way == "flag after forward":
                wrapped.require_backward_grad_sync = last
            with quiet() if way == "around backward" else nullcontext():
                loss.backward()
    return flat_gradient(wrapped), len(log)


def spread(tensor: torch.Tensor) -> float:
    """The largest difference between two ranks in any of its numbers."""
    extremes = torch.stack([tensor, -tensor])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return extremes.sum(0).max().item()


def drift(model, x, y, steps: int) -> float:
    """How far the ranks' weights are apart after some steps with averaged gradients."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(x, y).backward()
        average_gradients_flat(model, [])
        optimizer.step()
    return spread(torch.cat([p.detach().flatten() for p in model.parameters()]))


def traps(model, x, y, seed: int) -> Table:
    """What goes wrong, and right, as numbers; x, y: the whole batch."""
    mine, expected = (shard(x), shard(y)), big_batch_gradient(model, x, y)
    few, many = torch.full((10,), 1.0), torch.full((100,), 2.0)
    of_means, of_all = (few.mean() + many.mean()) / 2, torch.cat([few, many]).mean()
    rows = [("mean of 10 tokens' loss 1.0 and 100 tokens' 2.0", of_means.item(), of_all.item())]

    lengths = torch.randint(1, T, (len(y) - 1, 1), generator=torch.Generator().manual_seed(seed))
    short = y[:-1].masked_fill((torch.arange(T) >= lengths).to(y.device), -100)  # one fewer: uneven shards
    uneven, of_short = (shard(x[:-1]), shard(short)), big_batch_gradient(model, x[:-1], short)
    for_each_way = (mean_of_means_gradient, token_weighted_gradient)
    errors = [relative_error(gradient(model, *uneven), of_short) for gradient in for_each_way]
    rows.append(("uneven shards and lengths: error", *errors))

    gradient, count = accumulate(model, *mine, "around both")
    right = relative_error(gradient, expected)
    _, too_many = accumulate(model, *mine, "around backward")
    rows.append((f"no_sync around backward only: all-reduces, {MICRO_STEPS} micro-steps", too_many, count))
    gradient, _ = accumulate(model, *mine, "flag after forward")
    rows.append(("the same by a flag, set after forward: error", relative_error(gradient, expected), right))

    first = x[:PER_RANK], y[:PER_RANK]
    errors = [relative_error(mean_of_means_gradient(model, *some), expected) for some in (first, mine)]
    rows.append(("all ranks draw the same sequences: error", *errors))
    torch.manual_seed(seed + dist.get_rank())
    for steps in (0, 10):
        apart = [drift(start, *mine, steps) for start in (GPT(*SMALL).to(x.device), model)]
        rows.append((f"own initial weights: spread after {steps} steps", *apart))
    for name, _, right in rows:
        if "error" in name or "spread" in name:
            check(name, right, ERROR_BOUND)
    return Table("traps, none of which gives an error message:", "|wrong|right", "|.4g|.4g", rows)


# %% 5. Training, and what it gains
def train(model, data, steps: int, seed: int, together: bool) -> list[float]:
    """The losses of a run: on all ranks, or on this one with the whole batch."""
    model, rng, losses = copy.deepcopy(model), torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for _ in range(steps):
        x, y = batch(data, PER_RANK * dist.get_world_size(), T, rng)  # the same everywhere
        optimizer.zero_grad()
        loss = model.loss(shard(x), shard(y)) if together else model.loss(x, y)
        loss.backward()
        losses.append(loss.detach())
        if together:
            average_gradients_flat(model, [])
            dist.all_reduce(losses[-1])
            losses[-1] /= dist.get_world_size()
        optimizer.step()
    return torch.stack(losses).tolist()


def same_curve(model, data, steps: int, seed: int) -> str:
    """Train on all ranks, then on rank 0 with the whole batch; the losses agree to rounding."""
    ours = train(model, data, steps, seed, together=True)
    alone = train(model, data, steps, seed, together=False) if dist.get_rank() == 0 else ours
    apart = max(abs(a - b) for a, b in zip(ours, alone, strict=True))
    check("losses of the run on all ranks", apart, LOSS_BOUND)
    line = f"training, {steps} steps: loss {alone[0]:.4f} to {alone[-1]:.4f} on one process, whole batch,"
    return f"{line}\n  on {dist.get_world_size()} ranks at most {apart:.1e} away"


def scaling(model, x, y, device) -> Table:
    """A step of 1, 2, 4 .. ranks on the same whole batch: predicted and measured.

    Predicted is what one rank takes for its shard alone, times the ranks that share a core, and for the ring
    2 (n-1)/n bytes / bandwidth, the bandwidth being that of an all-reduce of 16 MiB.
    """
    rank, world, rows = dist.get_rank(), dist.get_world_size(), []
    large, gradient = torch.randn(RING_SIZES[-1], device=device), big_batch_gradient(model, x, y)
    cores = common.usable_cpus() / torch.get_num_threads() if device.type == "cpu" else world
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # ranks on this machine

    def backward(n):
        model.zero_grad()
        model.loss(x.tensor_split(n)[rank], y.tensor_split(n)[rank]).backward()

    def step(n, group):
        backward(n)
        dist.all_reduce(flat_gradient(model), group=group)

    for n in sorted({world, *(2**k for k in range(world.bit_length()))}):
        group = dist.new_group(range(n))
        if rank < n:
            own = common.measure(partial(backward, n), device, 7) if rank == 0 else 0.0
            measured = seconds(partial(step, n, group), device, group)
            ring = seconds(partial(dist.all_reduce, large, group=group), device, group)
            ring *= gradient.nbytes / large.nbytes if n > 1 else 0
            share = max(1.0, min(n, here) / cores)
            predicted = own * share + ring
            first = rows[0][5] if rows else measured
            rates = predicted / measured, x.numel() / measured, first / measured
            rows.append((n, own, share, ring, predicted, measured, *rates))
        dist.barrier()
    title = "one step on the same batch by more ranks"
    title += ", measured on a CPU whose cores they share:" if device.type == "cpu" else ":"
    head = "ranks|shard alone, s|ranks a core|ring, s|predicted, s|measured, s|ratio|tokens/s|speed-up"
    notes = "The prediction has bandwidth but no latency, which is what small gradients wait for."
    return Table(title, head, "|.4f|.1f|.4f|.4f|.4f|.2f|,.0f|.2f", rows, notes)


# %% 6. All of it
def worker(rank, world, device, seed: int, quick: bool) -> list:
    """The sections, on one rank of several: (what is printed of each, the states of the ring)."""
    common.set_precision("fp32", device)
    data, _ = (part.to(device) for part in common.split_corpus(common.read_corpus()[0], T))
    torch.manual_seed(seed + 1)  # at --seed 0 these are the seeds of the source
    model = GPT(*SMALL).to(device)
    x, y = batch(data, PER_RANK * world, T, torch.Generator().manual_seed(seed + 9))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    started = max(spread(x.float()), spread(weights))
    check("text and weights of the ranks (do all run one Python?)", started, 0)
    large = GPT(*LARGE[quick]).to(device)
    sizes = [max(1, world - 1), *RING_SIZES[: 2 if quick else 3]]
    states = who_holds_what(device)
    sections = (
        lambda: equal_shards(model, x, y),
        lambda: picture(states),
        lambda: ring_against_library(sizes, device, seed),
        lambda: ways_to_average(large, x, y, device),
        lambda: traps(model, x, y, seed),
        lambda: same_curve(model, data, 10 if quick else STEPS, seed),
        lambda: scaling(large, x, y, device),
    )
    tqdm.set_lock(
        threading.RLock()
    )  # its own is a semaphore of the system: a killed rank would leave it behind
    return [section() for section in tqdm(sections, leave=False, disable=rank > 0)], states


def draw(states):
    """The ring: a panel a state, a row a rank, a column a chunk; the darker, the more ranks in the sum."""
    from matplotlib.figure import Figure

    world = len(states[0])
    figure = Figure(figsize=(2 * len(states), 2.9), layout="constrained")
    for i, state in enumerate(states):
        axes = figure.add_subplot(1, len(states), i + 1)
        axes.imshow([[len(held) / world for held in row] for row in state], cmap="Blues", vmin=0, vmax=1.6)
        for rank, row in enumerate(state):
            for chunk, held in enumerate(row):
                axes.text(chunk, rank, held, ha="center", va="center", fontsize=9)
        half = "reduce-scatter" if i < world else "all-gather"
        axes.set_title(f"{half}\nstep {i}" if i else "start", fontsize=10)
        axes.set(xlabel="chunk", xticks=range(world), yticks=range(world), ylabel="" if i else "rank")
    figure.suptitle(
        "A ring all-reduce: whose numbers are in the sum that a rank holds. Each sends to the next"
    )
    return figure


def main():
    parser = common.Parser(__doc__)
    parser.add_argument("--ranks", type=common.positive, default=4, help="processes to start (default: 4)")
    args = parser.parse_args()
    device = common.choose_device(args.device)
    rank, world, _, local = common.torchrun() or (0, args.ranks, 0, args.ranks)
    backend, reason = common.choose_backend(device, local)
    device = device if backend == "nccl" else torch.device("cpu")
    if rank == 0:
        common.writable(args.out)
        threads = max(1, common.usable_cpus() // local)
        ranks = f" a rank | {world} ranks, {backend} ({reason})"
        print(common.header(device, "fp32", "as rounding is compared", threads, args.seed, ranks), flush=True)
    result = common.launch(worker, args.ranks, device, args.seed, args.quick)
    if result is None:
        return  # in another rank of torchrun
    parts, states = result
    lines = {"world": world, "lines": [part.splitlines() for part in parts if isinstance(part, str)]}
    common.save_results(args, device, lines, [part for part in parts if isinstance(part, Table)])
    common.save_figure(args.out / f"{NAME}.png", draw(states))
    for part in parts:
        print(f"\n{part}")


if __name__ == "__main__":
    common.run(main)

# Left out: the learning rate of a batch that grows with the ranks; rings of rings; compressed gradients.
# Exercise: send each bucket through ring_all_reduce in the hook of `distributed`. What must the hook return?
# Next: keep the two halves of the ring apart, and a rank needs the optimizer's state of one chunk only:
# 07_zero_memory.py.
