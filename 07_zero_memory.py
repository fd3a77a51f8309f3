# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "matplotlib>=3.8", "tqdm>=4.66"]
# ///
"""Where does the memory of training go, and how does sharding remove it?

A parameter costs 16 bytes before any activation is stored: weight, gradient, and what Adam keeps. All data
parallel ranks hold the same; ZeRO lets each hold a share, and gather the rest when it is needed. You will see
  - the 16 bytes term by term, and GB per GPU at each stage of ZeRO: which model fits on which GPU;
  - ZeRO by hand on real ranks, stages 0 to 3: the losses of one process, bytes counted beside the formula;
  - the same model through ZeroRedundancyOptimizer and fully_shard (FSDP2): the same losses, their bytes;
  - activations: bytes saved for the backward pass beside the formula, and what checkpointing saves and costs.

    python 07_zero_memory.py                                      four ranks: 20 s on two cores, 2.5 GB
    python 07_zero_memory.py --params 70B --gpus 64 --gpu h100    only the arithmetic, for a model of yours
    python 07_zero_memory.py --quick                              the same in miniature
    torchrun --standalone --nproc-per-node 4 07_zero_memory.py    in torchrun's ranks

Notation (example)
    N      parameters, all of them (7.5e9)      s  tokens in a sequence (64)    h  heads (4)
    world  ranks, n in formulas (4)             b  sequences in a batch (4)     t  tensor parallel ranks (8)
    rank   this one (0 to 3)                    d  width (64)                   L  layers (4)
"""

import argparse
import math
import os
import threading
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import common
from common import GPT, CheckFailed, Table, batch

NAME = Path(__file__).stem
# Bytes a parameter, mixed precision with Adam (Rajbhandari et al. 2020, 3.1), and the stage that shards them
TERMS = {"weights": (2, 3), "gradients": (2, 2), "master": (4, 1), "momentum": (4, 1), "variance": (4, 1)}
STAGES = (0, 1, 2, 3)  # 0: data parallel
TRAFFIC = (2, 2, 2, 3)  # parameters that a rank sends a step, times (n-1)/n
MEMORY = {"A100": 80, "H100": 80, "H200": 141, "B200": 192}  # GB, data sheets
MODELS = {
    "GPT-2": 1.5e9,
    "GPT-3": 175e9,
    "Llama 3 8B": 8.03e9,
    "Llama 3 70B": 70.6e9,
    "Llama 3 405B": 405.9e9,
}
SMALL, PER_RANK, T = (48, 2), 4, 64  # (d, L) of the model that is sharded; sequences of a rank; their tokens
STEPS, LEARNING_RATE, BETAS, EPS, CLIP = 20, 2e-3, (0.9, 0.999), 1e-8, 0.5
LOSS_BOUND = 1e-5  # nats: a loss near 5 is rounded by 5e-7, and the steps carry that on
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name from 2.13 on
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# %% 1. Sixteen bytes
def bytes_per_gpu(N: float, n: int, stage: int) -> dict[str, float]:
    """Bytes by term on each of n ranks: 16 N, then 4 + 12/n, 2 + 14/n, 16/n a parameter."""
    return {term: s * N / (n if stage >= sharded else 1) for term, (s, sharded) in TERMS.items()}


def traffic(n: int, stage: int) -> float:
    """Parameters that a rank sends a step; an all-reduce is 2 (n-1)/n, a gather or a scatter half of it."""
    return TRAFFIC[stage] * (n - 1) / n


def fewest_gpus(N: float, stage: int, memory: float) -> int | None:
    """The least n whose shares fit `memory` bytes; None if what every rank holds whole is too much."""
    whole = sum(s * N for s, sharded in TERMS.values() if sharded > stage)
    shared = 16 * N - whole
    if whole > memory or (shared and whole == memory):
        return None
    return max(1, math.ceil(shared / (memory - whole))) if shared else 1


def model_size(text: str) -> float:
    """argparse type: 70e9, 70B, or a model of MODELS."""
    named = {name.lower(): N for name, N in MODELS.items()}
    text = text.strip()
    if text.lower() in named:
        return named[text.lower()]
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        N = scale * float(text[:-1] if scale > 1 else text)
    except ValueError:
        N = math.nan
    if not 1e6 <= N <= 1e15:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no size from 1M to 1000T such as 70e9 or 70B, and none of {known}"
        )
    return N


def term_table(N: float) -> Table:
    """The 16 bytes."""
    rows = [(term, s, s * N / 1e9, sharded) for term, (s, sharded) in TERMS.items()]
    rows.append(("in all", sum(row[1] for row in rows), sum(row[2] for row in rows), None))
    notes = """Not in it: activations, the layer that stage 3 has just gathered, buffers for communication,
fragments, the CUDA context; and 4 more where gradients are kept in fp32 too."""
    title = f"mixed precision with Adam, {N / 1e9:,.4g}B parameters:"
    return Table(title, "|bytes a parameter|GB|sharded from stage", "||,.4g|", rows, notes)


def stage_table(N: float, n: int, gpu: str) -> Table:
    """GB per GPU by stage, whether that fits, and on how many it would."""
    rows, memory = [], MEMORY[gpu] * 1e9
    for stage in STAGES:
        weights, gradients, *optimiser = (x / 1e9 for x in bytes_per_gpu(N, n, stage).values())
        total, sent = weights + gradients + sum(optimiser), traffic(n, stage)
        fits = "yes" if total * 1e9 <= memory else "no"
        fewest = fewest_gpus(N, stage, memory)
        saved = 16 * N / 1e9 / total
        rows.append(
            (stage, weights, gradients, sum(optimiser), total, saved, fits, fewest, sent, 2 * N * sent / 1e9)
        )
    title = f"the same on {n:,} GPU{'s' * (n > 1)}, {gpu}, {MEMORY[gpu]} GB each:"
    head = "stage|weights, GB|gradients|Adam, master|in all|times less|fits|fewest GPUs|sent, N|sent, GB"
    notes = """fits: with nothing left for activations. fewest: on which it fits; "-": on none.
The 4x and 8x of the source are limits for many GPUs.
sent: by each GPU in a step, in 16 bit; (n-1)/n of 2 N, in stage 3 of 3 N."""
    return Table(title, head, "|,.4g|,.4g|,.4g|,.4g|,.4g|||.2f|,.4g", rows, notes)


# %% 2. ZeRO by hand
class Unit:
    """Parameters that travel together: one flat vector, padded so that every rank's shard is equally long."""

    def __init__(self, parameters: list, rank: int, world: int):
        self.parameters, self.numel = parameters, sum(p.numel() for p in parameters)
        self.length = self.numel + -self.numel % world
        self.full = parameters[0].new_zeros(self.length)
        self.nbytes, self.gradient, self.missing = self.full.nbytes, None, len(parameters)
        self.here = slice(rank * self.length // world, (rank + 1) * self.length // world)
        torch.cat([p.detach().flatten() for p in parameters], out=self.full[: self.numel])
        for p, part in zip(parameters, self.split(self.full), strict=True):
            p.data = part.view_as(p)  # the parameters are now windows on the vector

    def split(self, vector):
        """The parts of a flat vector that belong to the parameters; the padding is left out."""
        return vector[: self.numel].split([p.numel() for p in self.parameters])

    def free(self) -> None:
        """Give the memory of `full` back. Windows on it, autograd's too, see what is gathered later."""
        self.full.untyped_storage().resize_(0)

    @property
    def is_here(self) -> bool:
        return self.full.untyped_storage().nbytes() > 0


class Zero:
    """Adam with its state (stage 1), gradients (2) and weights (3) in shards; stage 0 is data parallel.

    Master weights and both moments are float32, whatever the model is in. The units are the blocks, and all
    other parameters together, which the model needs first and last (as FSDP has it). All parameters must get
    a gradient in each backward pass; those of several passes add up until `zero_grad`.
    """

    def __init__(self, model: GPT, stage: int):
        self.rank, self.world, self.stage = dist.get_rank(), dist.get_world_size(), stage
        self.sent, self.peak, self.steps = {}, {}, 0
        blocks = [list(block.parameters()) for block in model.blocks]
        inside = {id(p) for block in blocks for p in block}
        others = [p for p in model.parameters() if id(p) not in inside]
        self.units = [Unit(parameters, self.rank, self.world) for parameters in (others, *blocks)]
        for unit, module in zip(self.units, (model, *model.blocks), strict=True):
            unit.mine = unit.here if stage > 0 else slice(None)
            unit.master = unit.full[unit.mine].to(torch.float32, copy=True)
            unit.momentum, unit.variance = torch.zeros_like(unit.master), torch.zeros_like(unit.master)
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(partial(self.gradient_is_ready, unit))
            if stage == 3:
                unit.shard = unit.full[unit.here].clone()
                unit.free()
                module.register_forward_pre_hook(partial(self.gather, unit))
                # The unit of the model itself stays until its gradients are ready, if there are to be any.
                stays = module is model
                module.register_forward_hook(partial(self.forward_is_done, unit, stays))
                if not stays:
                    module.register_full_backward_pre_hook(partial(self.gather, unit))

    def count(self, collective: str, nbytes: int, passes: int = 1) -> None:
        self.sent[collective] = (
            self.sent.get(collective, 0) + passes * nbytes * (self.world - 1) // self.world
        )

    def gather(self, unit: Unit, *_) -> None:
        """Stage 3: the whole unit from everybody's shards."""
        if not unit.is_here:
            unit.full.untyped_storage().resize_(unit.nbytes)
            gather_into(unit.full, unit.shard)
            self.count("all-gather", unit.nbytes)
            self.note_peak()

    def forward_is_done(self, unit: Unit, stays: bool, *_) -> None:
        if not (stays and torch.is_grad_enabled()):
            unit.free()

    def gradient_is_ready(self, unit: Unit, _) -> None:
        """Once all of a unit's are: average them over the ranks, and keep what this stage keeps."""
        unit.missing -= 1
        if unit.missing:
            return
        unit.missing, flat = len(unit.parameters), unit.parameters[0].new_zeros(unit.length)
        self.note_peak(flat.nbytes)
        for p, part in zip(unit.parameters, unit.split(flat), strict=True):
            part.copy_(p.grad.flatten())
            p.grad = None
        flat /= self.world
        if self.stage == 0:
            dist.all_reduce(flat)
            self.count("all-reduce", flat.nbytes, passes=2)
        else:
            own = torch.empty_like(flat[unit.here])
            scatter_into(own, flat)
            self.count("reduce-scatter", flat.nbytes)
            self.note_peak(flat.nbytes + own.nbytes)
            if self.stage == 1:
                flat[unit.here] = own  # the rest of it is of no use, but stays
            else:
                flat = own
        unit.gradient = flat if unit.gradient is None else unit.gradient + flat
        if self.stage == 3:
            unit.free()
        self.note_peak()

    def own_gradient(self, unit: Unit):
        return unit.gradient[unit.mine].float() if self.stage < 2 else unit.gradient.float()

    def gradient_norm(self) -> float:
        """Of the averaged gradient: squares are added up over shards, then over ranks."""
        square = sum(self.own_gradient(unit).square().sum() for unit in self.units)
        if self.stage > 0:
            dist.all_reduce(square)
        return square.sqrt().item()

    def step(self) -> float:
        """Clip, a step of Adam on this rank's shard (Kingma & Ba 2015), the new weights to all. The norm."""
        self.steps += 1
        norm = self.gradient_norm()
        for unit in self.units:
            g = self.own_gradient(unit) * min(1.0, CLIP / (norm + 1e-6))
            squares = g * g
            self.note_peak(g.nbytes + squares.nbytes)
            unit.momentum.lerp_(g, 1 - BETAS[0])
            unit.variance.lerp_(squares, 1 - BETAS[1])
            m, v = (
                x / (1 - b**self.steps) for x, b in zip((unit.momentum, unit.variance), BETAS, strict=True)
            )
            unit.master -= LEARNING_RATE * m / (v.sqrt() + EPS)
            if self.stage == 3:
                unit.shard.copy_(unit.master)
                unit.free()  # what an evaluation may have gathered is out of date
                continue
            unit.full[unit.mine] = unit.master.to(unit.full.dtype)
            if self.stage > 0:
                gather_into(unit.full, unit.full[unit.here].clone())
                self.count("all-gather", unit.nbytes)
        self.note_peak()
        return norm

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.gradient = None

    def held(self) -> dict[str, int]:
        """Bytes of the tensors that are alive on this rank."""
        tensors = {"weights": [], "gradients": [], "Adam, master": []}
        for unit in self.units:
            tensors["weights"] += [unit.shard] if self.stage == 3 else []
            tensors["gradients"] += [
                g for g in (unit.gradient, *(p.grad for p in unit.parameters)) if g is not None
            ]
            tensors["Adam, master"] += [unit.master, unit.momentum, unit.variance]
        held = {name: sum(t.nbytes for t in some) for name, some in tensors.items()}
        held["weights"] += sum(unit.full.untyped_storage().nbytes() for unit in self.units)
        return held

    def note_peak(self, more_gradients: int = 0) -> None:
        now = self.held()
        now["gradients"] += more_gradients
        self.peak = {name: max(size, self.peak.get(name, 0)) for name, size in now.items()}


# %% 3. Measured: bytes, traffic, and the same losses
def flat(tensors):
    """One vector; of a DTensor the whole."""
    return torch.cat([(t.full_tensor() if hasattr(t, "full_tensor") else t).flatten() for t in tensors])


def adam_alone(model, data, steps: int, world: int, seed: int) -> dict:
    """The reference: one process, the whole batch, torch's Adam and clipping."""
    optimiser, generator = torch.optim.Adam(model.parameters(), LEARNING_RATE, BETAS, EPS), torch.Generator()
    generator.manual_seed(seed)
    losses, norms, gradient = [], [], None
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model.loss(*batch(data, PER_RANK * world, T, generator))
        loss.backward()
        gradient = flat([p.grad for p in model.parameters()]) if gradient is None else gradient
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimiser.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "gradient": gradient}


def own_share(data, generator):
    """This rank's sequences of a batch that all ranks draw alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return tuple(
        z[rank * PER_RANK : (rank + 1) * PER_RANK] for z in batch(data, PER_RANK * world, T, generator)
    )


def over_ranks(value: float, op=dist.ReduceOp.SUM, device=None) -> float:
    total = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(total, op)
    return total.item()


def train(model, stage: int, data, steps: int, seed: int) -> dict:
    """Losses and norms of a run with `Zero`, what this rank holds at rest and at most, bytes sent a step."""
    zero, generator, losses, norms = Zero(model, stage), torch.Generator().manual_seed(seed), [], []
    for _ in range(steps):
        zero.zero_grad()
        loss = model.loss(*own_share(data, generator))
        loss.backward()
        norms.append(zero.step())
        losses.append(over_ranks(loss.item()) / zero.world)
    sent = {name: n / steps for name, n in zero.sent.items()}
    padded = sum(unit.length for unit in zero.units)
    return {
        "losses": losses,
        "norms": norms,
        "rest": zero.held(),
        "peak": zero.peak,
        "sent": sent,
        "N": padded,
        "zero": zero,
    }


def furthest(run: dict, reference: dict, what: str) -> float:
    pairs = zip(run[what], reference[what], strict=True)
    return max(abs(a - b) / (1 if what == "losses" else b) for a, b in pairs)


def zero_tables(data, steps: int, seed: int, device) -> tuple[list[Table], dict, dict]:
    """All four stages: bytes beside the formula in bf16, losses beside one process in float32."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def new_model(dtype=torch.float32):
        torch.manual_seed(seed)
        return GPT(*SMALL, T=T).to(device, dtype)

    alone = adam_alone(new_model(), data, steps, world, seed) if rank == 0 else None
    held, same = [], []
    for stage in STAGES:
        run = train(new_model(torch.bfloat16), stage, data, 2, seed)
        N, formula = run["N"], bytes_per_gpu(run["N"], world, stage)
        expected = {name: formula[name] for name in ("weights", "gradients")}
        expected["Adam, master"] = sum(formula[name] for name in ("master", "momentum", "variance"))
        if run["rest"] != expected:
            raise CheckFailed(f"stage {stage}: holds {run['rest']} bytes at rest, by the formula {expected}")
        a, b, c = expected
        rest, most = ({name: run[kind][name] / N for name in expected} for kind in ("rest", "peak"))
        formula = {name: expected[name] / N for name in expected}
        sent = {name: n / N / 2 for name, n in run["sent"].items()}
        ways = ", ".join(f"{name} {n:.2f}" for name, n in sent.items())
        row = [rest[a], formula[a], most[a], rest[b], formula[b], most[b], rest[c], formula[c]]
        total = sum(rest.values()), sum(formula.values())
        # Stage 3 as it is here: the first unit is gathered once, blocks twice, all gradients scattered.
        once = run["zero"].units[0].length if stage == 3 else N
        expected_sent = (2 * N if stage < 3 else once + 2 * (N - once) + N) * (world - 1) / world / N
        if abs(sum(sent.values()) - expected_sent) > 1e-3:
            raise CheckFailed(f"stage {stage}: {sent} parameters sent, expected {expected_sent}")
        row += total[0] / total[1], sum(sent.values()), expected_sent, traffic(world, stage), ways
        held.append((stage, *row))
        exact = train(new_model(), stage, data, steps, seed)
        if rank == 0:
            errors = furthest(exact, alone, "losses"), furthest(exact, alone, "norms")
            if not max(errors) < LOSS_BOUND:
                raise CheckFailed(
                    f"stage {stage}: losses {errors[0]:.1e}, norms {errors[1]:.1e} from one process"
                )
            same.append((stage, exact["losses"][0], exact["losses"][-1], *errors))
    head = "stage|weights|formula|peak|gradients|formula|peak|Adam, master|formula|ratio|sent, N|due|paper|by"
    title = f"ZeRO by hand, GPT of {SMALL[0]} x {SMALL[1]} in bf16, bytes a parameter, rank 0 of {world}:"
    notes = """At rest, after a step, to the byte, with the padding: each rank checks its own.
Peaks: gradients of a unit with their flat copy and shard, or in a step in float32, and their squares; in
stage 3 embeddings and head for both passes, so they are sent once, where the paper has twice, and a block.
Adam makes two corrected moments of a unit for a moment, which are not counted.
sent: the volume of a ring's collectives for these calls."""
    tables = [Table(title, head, "|.3f|.3f|.3f|.3f|.3f|.3f|.3f|.3f|.3f|.2f|.2f|.2f|", held, notes)]
    if rank == 0:
        title = f"the same in float32, {steps} steps, beside one process with the whole batch:"
        note = f"Norms are of the whole gradient, added up over shards, and clipped to {CLIP}."
        head = "stage|first loss|last loss|losses apart by|norms apart by"
        tables.append(Table(title, head, "|.4f|.4f|.1e|.1e", same, note))
    return tables, alone, held


def wire_table(device) -> Table | None:
    """What a rank sends in a collective, by the counter of the loopback device; None where there is none."""
    counter, world = Path("/sys/class/net/lo/statistics/tx_bytes"), dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device.type == "cuda" or world == 1 or local < world or not counter.exists():
        return None
    whole = torch.ones(world * 2**18)
    part, rows = torch.ones(2**18), []
    calls = {
        "all-reduce": (partial(dist.all_reduce, whole), 2),
        "reduce-scatter": (partial(scatter_into, part, whole), 1),
        "all-gather": (partial(gather_into, whole, part), 1),
    }
    for name, (call, passes) in calls.items():
        call()
        dist.barrier()
        before = int(counter.read_text())
        for _ in range(4):
            call()
        dist.barrier()
        sent = (int(counter.read_text()) - before) / 4 / world / whole.nbytes
        ring = passes * (world - 1) / world
        rows.append((name, sent, ring, sent / ring))
    title = f"what {world} ranks really send, each, in units of the buffer, by the loopback device:"
    note = "gloo makes a reduce-scatter of an all-reduce, and sends twice what a ring would."
    note = note if rows[1][3] > 1.5 else ""
    return Table(title, "|sent|ring|ratio", "|.3f|.3f|.2f", rows, note)


# %% 4. The same through the library
def bytes_of(tensors) -> int:
    """Of this rank's part: a DTensor's `shape` is the whole's."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def averages(device) -> bool:
    """Does reduce-scatter average when asked to? Some versions of gloo summed (pytorch issue 162338)."""
    out = torch.empty(1, device=device)
    scatter_into(out, torch.ones(dist.get_world_size(), device=device), op=dist.ReduceOp.AVG)
    return out.item() == 1


def library_run(way: str, data, steps: int, seed: int, device) -> dict:
    """As `train`: ZeroRedundancyOptimizer (stage 1), or fully_shard (3), weights kept for backward or not."""
    torch.manual_seed(seed)
    model, world, generator = (
        GPT(*SMALL, T=T).to(device),
        dist.get_world_size(),
        torch.Generator().manual_seed(seed),
    )
    settings = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS}
    if way == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # not above: it takes a second

        run = DistributedDataParallel(model, gradient_as_bucket_view=True)  # else gradients are there twice
        optimiser = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **settings)
        state_of, factor = (lambda: optimiser.optim.state), 1
    else:
        reshard = "kept" not in way
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        run = fully_shard(model, reshard_after_forward=reshard)
        optimiser = torch.optim.Adam(model.parameters(), **settings)  # made after: it must see the shards
        state_of, factor = (lambda: optimiser.state), 1 if averages(device) else 1 / world
    losses, norms, gradient = [], [], None
    for _ in range(steps):
        x, y = own_share(data, generator)
        optimiser.zero_grad()
        with CommDebugMode() as collectives:
            loss = F.cross_entropy(run(x).flatten(0, 1), y.flatten())
            whole = bytes_of([p for p in model.parameters() if not hasattr(p, "to_local")])
            loss.backward()
        for p in model.parameters():
            p.grad *= factor
        gradient = flat([p.grad for p in model.parameters()]) if gradient is None else gradient
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimiser.step()
        losses.append(over_ranks(loss.item(), device=device) / world)
    moments = [t for state in state_of().values() for t in state.values() if t.ndim]
    parameters = list(model.parameters())
    rest = [bytes_of(parameters), bytes_of([p.grad for p in parameters]), bytes_of(moments)]
    rest = [over_ranks(n, dist.ReduceOp.MAX, device) for n in rest]
    shards = rest[0] if way.startswith("fully_shard") else 0
    gathers = sum(n for name, n in collectives.get_comm_counts().items() if "allgather" in str(name))
    return {
        "losses": losses,
        "norms": norms,
        "rest": rest,
        "factor": factor,
        "gathers": gathers,
        "gradient": gradient,
        "between": shards + whole,
    }


def library_table(alone: dict, data, steps: int, seed: int, device) -> Table:
    rows, world = [], dist.get_world_size()
    torch.manual_seed(seed)
    N, told = sum(p.numel() for p in GPT(*SMALL, T=T).parameters()), ""
    for way, stage in (("ZeroRedundancyOptimizer", 1), ("fully_shard, weights kept", 3), ("fully_shard", 3)):
        run = library_run(way, data, steps, seed, device)
        expected = [4 / (world if stage == 3 else 1), 4 / (world if stage == 3 else 1), 8 / world]
        errors = [0.0, 0.0, 0.0]
        if alone:
            apart = (run["gradient"] - alone["gradient"]).abs().max() / alone["gradient"].abs().max()
            errors = [*(furthest(run, alone, what) for what in ("losses", "norms")), apart.item()]
        if not max(errors) < LOSS_BOUND:
            raise CheckFailed(f"{way}: losses, norms, gradient {errors} from those of one process")
        cells = [x for n, formula in zip(run["rest"], expected, strict=True) for x in (n / N, formula)]
        cells.insert(2, run["between"] / N)
        rows.append((way, *cells, run["gathers"], *errors))
        told = (
            ""
            if run["factor"] == 1
            else "\nreduce-scatter sums here where it should average: gradients divided."
        )
    head = "|weights|formula|after forward|gradients|formula|Adam|formula|all-gathers|losses|norms|gradient"
    notes = """Bytes a parameter at rest on the rank with most, float32, no master weights. The library splits
by parameters or their rows, not evenly. Weights kept: whole from forward to backward, and gathered once.
losses, norms, gradient: apart from those of one process."""
    title = f"the same model through the library, {steps} steps:"
    return Table(title, head, "|.3f|.3f|.3f|.3f|.3f|.3f|.3f||.1e|.1e|.1e", rows, notes + told)


# %% 5. Activations
def activation_bytes(s, b, d, h, recompute: str = "nothing", t: int = 1, sequence: bool = False) -> float:
    """Bytes that a layer saves in 16 bit (Korthikanti et al. 2022, eq. 1, 2, 4 and table 2).

    recompute: nothing, attention (the scores), or all. t: tensor parallel ranks, sequence parallel or not.
    """
    if recompute == "all":
        return 2 * s * b * d / (t if sequence else 1)
    scores = 0 if recompute == "attention" else 5 * h * s / d
    return s * b * d * ((34 + scores) / t if sequence else 10 + (24 + scores) / t)


class PaperLayer(common.Block):
    """The layer of the formula: ours with dropout, on the weights of attention and after either half."""

    @staticmethod
    def drop(x):
        return torch.native_dropout(x, 0.1, True)[0]  # saves a mask of a byte a number

    def attention(self, q, k, v):
        s = q.shape[-2]
        return self.drop((q @ k.mT * q.shape[-1] ** -0.5 + self.mask[:s, :s]).softmax(-1)) @ v

    def forward(self, x):  # (b, s, d)
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.proj(self.attention(q, k, v).transpose(1, 2).reshape(b, s, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Saved:
    """Bytes of what autograd saves for the backward pass, each piece of memory once, parameters left out."""

    def __init__(self, module):
        self.pieces, self.known = (
            {},
            {p.untyped_storage().data_ptr() for p in [*module.parameters(), *module.buffers()]},
        )

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.pieces[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.pieces.values())

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.see, lambda tensor: tensor)


def forward_in(way: str, model: GPT, x, saved: Saved):
    """The model's logits, some of whose blocks are to be computed again on the way back."""
    every = 3 if "third" in way else 2 if "second" in way else 1 if "block" in way else 0

    def again(function, *inputs):
        for tensor in inputs:  # what a checkpoint keeps, it keeps by itself
            saved.see(tensor)
        return checkpoint(function, *inputs, use_reentrant=False)

    hidden = model.tok(x) + model.pos.weight[: x.shape[1]]
    for i, block in enumerate(model.blocks):
        if way == "attention":
            block.attention = partial(again, partial(type(block).attention, block))
        hidden = again(block, hidden) if every and i % every == 0 else block(hidden)
        block.__dict__.pop("attention", None)
    return model.head(model.ln(hidden))


def layer_table(s: int, b: int, d: int, h: int, seed: int) -> Table:
    """Bytes that one layer saves: the formula's layer in bf16, and ours in float32."""
    torch.manual_seed(seed)
    rows = []
    for name, kind, dtype, factor in (
        ("of the formula, bf16: 34 + 5 h s / d", PaperLayer, torch.bfloat16, 34 + 5 * h * s / d),
        ("ours, float32: 4 (16 + h s / d)", common.Block, torch.float32, 4 * (16 + h * s / d)),
    ):
        layer = kind(d, h, s).to(dtype)
        saved = Saved(layer)
        with saved.hooks():
            layer(torch.randn(b, s, d, dtype=dtype, requires_grad=True))
        norms = (
            4 * s * b * dtype.itemsize
        )  # mean and deviation of two LayerNorms, which the formula leaves out
        expected = round(s * b * d * factor) + norms
        if saved.bytes != expected:
            raise CheckFailed(f"{name}: {saved.bytes} bytes saved, {expected} expected")
        rows.append((name, saved.bytes, expected, saved.bytes / (s * b * d), factor))
    title = f"activations that a layer saves, s = {s}, b = {b}, d = {d}, h = {h}:"
    notes = """Expected: with the means and deviations of two LayerNorms, which the formula leaves out.
Ours has no dropout: 32 + 2 h s / d in 16 bit, less by masks, 2 + h s / d, and what dropout makes of
attention's weights, 2 h s / d."""
    return Table(title, "|bytes|expected|/ (s b d)|formula", "|,|,|.2f|.2f", rows, notes)


def checkpoint_table(s: int, b: int, d: int, L: int, data, seed: int) -> Table:
    """What the whole model saves and computes with checkpoints; the gradient stays the same, bit by bit."""
    torch.manual_seed(seed)
    model, rows, first = GPT(d, L, T=s), [], {}
    x, y = batch(data, b, s, torch.Generator().manual_seed(seed))
    h, unit = model.blocks[0].h, 4 * s * b * d
    block = 16 + h * s / d + 4 / d
    around = (
        2 + common.V / d + 2 / d + 4 / d
    )  # last LayerNorm, head, softmax of the logits, tokens in and out
    kept = {"no checkpoints": L * block, "attention": L * (block - h * s / d)}
    for way, k in {"every second block": 2, "every third block": 3}.items():
        kept[way] = math.ceil(L / k) + (L - math.ceil(L / k)) * block
    # FLOPs a token, forward. What is computed again ends as soon as all that was saved is there: before the
    # last matmul of a block, 8 d^2, and of attention, 2 s d.
    blocks, head = L * (24 * d * d + 4 * s * d), 2 * common.V * d
    again = L * (16 * d * d + 4 * s * d)
    more = {"no checkpoints": 0, "every block": again, "attention": L * 2 * s * d}
    more |= {
        way: again * math.ceil(L / k) / L for way, k in (("every second block", 2), ("every third block", 3))
    }
    kept |= {"every block": L, "every block, to its end": L}
    more |= {"every block, to its end": blocks}
    for way in kept:
        saved = Saved(model)
        model.zero_grad()
        with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop("end" not in way):
            with saved.hooks():
                loss = F.cross_entropy(forward_in(way, model, x, saved).flatten(0, 1), y.flatten())
            loss.backward()
        gradient, flops = torch.cat([p.grad.flatten() for p in model.parameters()]), counter.get_total_flops()
        if not torch.equal(gradient, first.setdefault("gradient", gradient)):
            raise CheckFailed(f"{way}: the gradient is not what it is without checkpoints")
        ratio, expected = flops / first.setdefault("flops", flops), 1 + more[way] / (3 * (blocks + head))
        predicted = (
            round(unit * (kept[way] + around)) + 8 * b + 4
        )  # a window has s + 1 tokens; a sum of weights
        if saved.bytes != predicted or abs(ratio - expected) > 1e-9:
            found = f"{saved.bytes} bytes, FLOPs x {ratio}"
            raise CheckFailed(f"{way}: {found}; expected {predicted} and {expected}")
        rows.append((way, saved.bytes / 1e6, predicted / 1e6, saved.bytes / predicted, ratio, expected))
    title = f"checkpoints, {L} blocks, float32, s = {s}, b = {b}, d = {d}:"
    notes = """Gradients are the same, bit for bit. Going back, one block more is alive at a time. A
forward pass again is a third more FLOPs, but for the head's and, unless told so, those of each block's
last matmul."""
    head = "computed again|saved, MB|predicted|ratio|FLOPs|predicted"
    return Table(title, head, "|.3f|.3f|.3f|.3f|.3f", rows, notes)


def bill_table(N: float = 70.6e9, s=8192, b=1, d=8192, h=64, L=80, t=8) -> Table:
    """States and activations of a 70B model, one sequence, on one GPU and on t that share each layer."""
    rows, states = [], 16 * N / 1e9
    for recompute in ("nothing", "attention", "all"):
        size = partial(activation_bytes, s, b, d, h, recompute)
        cells = [L * x / 1e9 for x in (size(), size(t), size(t, True))]
        # While a layer is done again, all of it is there.
        again = [activation_bytes(s, b, d, h, "nothing", *how) - size(*how) for how in ((), (t, True))]
        cells += [states + cells[0] + again[0] / 1e9, states / t + cells[2] + again[1] / 1e9]
        rows.append((recompute, *cells))
    head = f"computed again|GB|tensor parallel {t}|and sequence|all, 1 GPU|all, 1 of {t}"
    title = f"activations of a 70B model, s = {s:,}, b = {b}, d = {d:,}, h = {h}, L = {L}:"
    notes = f"""all: with 16 bytes a parameter, {states:,.0f} GB, and the layer that is just done again.
Nine tenths of what is saved if nothing is are attention's scores, which FlashAttention makes again.
The layer is the formula's; Llama's has other shapes. Embeddings, head and logits are left out."""
    return Table(title, head, "|,.1f|,.1f|,.1f|,.0f|,.0f", rows, notes)


# %% 6. All of it
def worker(rank, world, device, seed: int, quick: bool) -> tuple[list[Table], list]:
    common.set_precision("fp32", device)
    warnings.simplefilter("ignore")  # the library's remarks on hooks and views
    data = common.split_corpus(common.read_corpus()[0], T)[0].to(device)
    tqdm.set_lock(
        threading.RLock()
    )  # its own is a semaphore of the system: a killed rank would leave it behind
    steps = 4 if quick else STEPS
    with tqdm(total=3, leave=False, disable=rank > 0) as bar:
        tables, alone, held = zero_tables(data, steps, seed, device)
        tables += [table] if (table := wire_table(device)) else []
        bar.update()
        tables.append(library_table(alone, data, steps, seed, device))
        bar.update()
        if rank == 0:
            data = data.cpu()
            tables += [layer_table(64, 4, 64, 4, seed), checkpoint_table(64, 4, 64, 6, data, seed)]
        bar.update()
    return tables, held


def draw(N: float, n: int, gpu: str, held: list):
    """Left: GB per GPU by stage and term. Right: bytes a parameter that rank 0 held in the small model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12 if held else 7, 5), layout="constrained")
    left, *right = figure.subplots(1, 2 if held else 1, squeeze=False)[0]
    terms = list(TERMS)
    values = [[bytes_per_gpu(N, n, stage)[term] / 1e9 for term in terms] for stage in STAGES]
    panels = [(left, terms, values)]
    if held:
        names = ("weights", "gradients", "Adam, master")
        panels.append((right[0], names, [[row[i] for i in (1, 4, 7)] for row in held]))
    for axes, labels, stacks in panels:
        bottom = [0.0] * len(STAGES)
        for i, label in enumerate(labels):
            heights = [stack[i] for stack in stacks]
            color = "gray" if label == "Adam, master" else f"C{i}"
            axes.bar([str(stage) for stage in STAGES], heights, bottom=bottom, label=label, color=color)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        for stage, total in enumerate(bottom):
            axes.text(stage, total, f"{total:.3g}", ha="center", va="bottom")
        axes.set(xlabel="ZeRO stage (0: data parallel)")
        axes.legend(frameon=False)
    left.axhline(MEMORY[gpu], color="black", lw=1, ls="--")
    left.text(3.45, MEMORY[gpu], f"{gpu}: {MEMORY[gpu]} GB", ha="right", va="bottom")
    left.set(ylabel="GB per GPU, before activations", title=f"{N / 1e9:,.4g}B parameters on {n:,} GPUs")
    if held:
        right[0].set(ylabel="bytes a parameter at rest, measured", title="The small model, rank 0")
    return figure


def main():
    parser = common.Parser(__doc__)
    parser.add_argument("--ranks", type=common.positive, default=4, help="processes to start (default: 4)")
    parser.add_argument(
        "--params",
        type=model_size,
        help=f"70e9, 70B or one of {', '.join(MODELS)}: only the arithmetic for it",
    )
    parser.add_argument("--gpus", type=common.positive, default=64, help="that share them (default: 64)")
    parser.add_argument("--gpu", default="H100", type=str.upper, choices=MEMORY, help="default: H100")
    args = parser.parse_args()
    device = common.choose_device(args.device)
    rank, world, _, local = common.torchrun() or (0, args.ranks, 0, args.ranks)
    backend, reason = common.choose_backend(device, local)
    device = device if backend == "nccl" else torch.device("cpu")
    if rank == 0:
        common.writable(args.out)
        threads = max(1, common.usable_cpus() // local)
        ranks = "" if args.params else f" a rank | {world} ranks, {backend} ({reason})"
        print(common.header(device, "fp32", "where no other is named", threads, args.seed, ranks), flush=True)
    N, held, tables = args.params or 7.5e9, [], []
    if not args.params:
        result = common.launch(worker, args.ranks, device, args.seed, args.quick)
        if result is None:
            return  # in another rank of torchrun
        tables, held = result
    elif rank > 0:
        return
    tables = [
        term_table(N),
        stage_table(N, args.gpus, args.gpu),
        *tables,
        *([] if args.params else [bill_table()]),
    ]
    common.save_results(args, device, {"world": world}, tables)
    common.save_figure(args.out / f"{NAME}.png", draw(N, args.gpus, args.gpu, held))
    for table in tables:
        print(f"\n{table}")


if __name__ == "__main__":
    common.run(main)

# Left out: shards of the optimiser on the CPU or a disk; overlap of gathers with computing; 8-bit moments.
# Exercise: keep a block's weights from the forward to the backward pass in stage 3. Which traffic is left,
# and what does it cost in bytes?
# Back to: 06_data_parallel.py, where all of this began with one all-reduce.
