"""Functions that new processes can import by name. Under torchrun: `workers.py FOLDER`."""

import copy
import functools
import gc
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from conftest import load_script

import common


def touch(path):
    Path(path).write_text(str(os.getpid()))


def sleep_or_die(seconds, code):
    time.sleep(seconds)
    os._exit(code)


def fail_with(message):
    raise common.CheckFailed(message)


def all_reduce(rank, world, device, folder):
    """Every rank writes what it has seen."""
    total = torch.tensor([float(2**rank)], device=device)
    dist.all_reduce(total)
    seen = f"{rank} {world} {int(total)} {dist.get_backend()} {torch.get_num_threads()}"
    (Path(folder) / f"rank{rank}").write_text(seen)
    return seen


def die(rank, world, device, victim):
    """The victim leaves without a word; the others wait for it in a collective."""
    if rank == victim:
        os._exit(86)
    dist.all_reduce(torch.ones(1))
    time.sleep(3600)


def serve(rank, port, pipe):
    """A rank of the pool: for each case join a group of its size, call, and send back what came out."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    for case, world, script, function, args in iter(pipe.recv, None):
        prefix = dist.PrefixStore(f"case {case}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world)
        try:
            pipe.send(("returned", globals()[function](loaded(script), *args)))
        except Exception as error:
            pipe.send(("raised", error))
        dist.destroy_process_group()


@functools.cache
def loaded(script):
    return load_script(script)


# Cases of 06_data_parallel
def ring(script, sizes, dtype, seed):
    """(the sum by the ring, by the library, bytes sent) for each size; whole numbers, so no rounding."""
    results = []
    for size in sizes:
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        ours = torch.randint(-50, 50, (size,), generator=generator).to(dtype)
        library = ours.clone()
        dist.all_reduce(library)
        sent = script.ring_all_reduce(ours)
        results.append((ours.numpy(), library.numpy(), sent))
    return results


def ring_of_large_floats(script, numbers):
    """The largest difference to the library over the world's sum, for a message of many bytes."""
    ours = torch.randn(numbers, generator=torch.Generator().manual_seed(dist.get_rank()))
    library, size = ours.clone(), ours.abs()
    dist.all_reduce(library)
    dist.all_reduce(size)
    sent = script.ring_all_reduce(ours)
    return ((ours - library).abs() / size).max().item(), sent


def ring_of_a_view(script):
    """A transposed matrix is refused; its contiguous copy gives the sum."""
    x = torch.arange(12.0).view(3, 4) * (dist.get_rank() + 1)
    try:
        script.ring_all_reduce(x.t())
    except ValueError as error:
        copy = x.t().contiguous()
        script.ring_all_reduce(copy)
        return str(error), copy.numpy()


def holdings(script):
    return script.who_holds_what(torch.device("cpu"))


def gradients(script, counts, lengths, seed):
    """(token-weighted, mean of means, big batch) gradients, sequences dealt out as `counts` says."""
    torch.manual_seed(seed)
    model, T = script.GPT(8, 1, T=8), 8
    x, y = (torch.randint(0, 256, (len(lengths), T)) for _ in range(2))
    y[torch.arange(T) >= torch.tensor(lengths)[:, None]] = -100
    start = sum(counts[: dist.get_rank()])
    mine = slice(start, start + counts[dist.get_rank()])
    weighted = script.token_weighted_gradient(model, x[mine], y[mine])
    naive = script.mean_of_means_gradient(model, x[mine], y[mine])
    return [g.double().numpy() for g in (weighted, naive, script.big_batch_gradient(model, x, y))]


def accumulated(script, way):
    """(error against the big batch, all-reduces, spread over the ranks)."""
    torch.manual_seed(0)
    model, B = script.GPT(8, 1, T=8), script.MICRO_STEPS * dist.get_world_size()
    x, y = (torch.randint(0, 256, (B, 8)) for _ in range(2))
    gradient, count = script.accumulate(model, script.shard(x), script.shard(y), way)
    error = script.relative_error(gradient, script.big_batch_gradient(model, x, y))
    return error, count, script.spread(gradient)


def curves(script, steps):
    torch.manual_seed(0)
    model = script.GPT(8, 1)
    data = (torch.arange(2000) % 7).to(torch.uint8)  # to be learnt in a few steps
    return [script.train(model, data, steps, 0, together) for together in (True, False)]


def averaged(script):
    """Gradients averaged one by one and in a row, a parameter without a gradient among them."""
    torch.manual_seed(dist.get_rank())
    results = []
    for average in (script.average_gradients, script.average_gradients_flat):
        model, log = torch.nn.Linear(3, 2), []
        model.weight.grad = torch.full((2, 3), float(dist.get_rank()))
        model.bias.grad = torch.full((2,), 1.0)
        if average is script.average_gradients_flat and dist.get_rank() == 0:
            model.bias.grad = None
        average(model, log)
        results.append((model.weight.grad.numpy(), model.bias.grad.numpy(), [size for size, _ in log]))
    return results


if __name__ == "__main__":
    common.run(lambda: common.launch(all_reduce, 2, torch.device("cpu"), sys.argv[1]))


# Cases of 07_zero_memory
def bytes_to_learn(seed):
    return torch.randint(0, 256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def sharded(script, stage, d, L, steps, seed):
    """([losses, norms, weights apart from one process], bytes at rest, bytes sent, N, padding)."""
    script.CLIP = 0.05  # so that it is always at work, more in one step than in another
    data, world = bytes_to_learn(seed), dist.get_world_size()
    torch.manual_seed(seed)
    model = common.GPT(d, L, T=script.T)
    alone = copy.deepcopy(model)
    expected = script.adam_alone(alone, data, steps, world, seed)
    run = script.train(model, stage, data, steps, seed)
    zero = run["zero"]
    padding = [unit.length - unit.numel for unit in zero.units]
    for unit in zero.units:
        zero.gather(unit)
    apart = max(
        (a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    errors = [script.furthest(run, expected, what) for what in ("losses", "norms")]
    return [*errors, apart], run["rest"], run["sent"], run["N"], padding


def accumulated_by_zero(script, stage):
    """(norm after two backward passes, after one) over the same batch."""
    norms, data = [], bytes_to_learn(0)
    for passes in (2, 1):
        torch.manual_seed(0)
        model = common.GPT(12, 1, T=script.T)
        zero = script.Zero(model, stage)
        for _ in range(passes):
            model.loss(*script.own_share(data, torch.Generator().manual_seed(0))).backward()
        norms.append(zero.gradient_norm())
    return norms


def evaluated_by_zero(script):
    """Losses in stage 3 without and with evaluations between backward and step, and bytes held at the end."""
    losses, held = [], []
    for evaluate in (False, True):
        torch.manual_seed(0)
        model, generator = common.GPT(12, 2, T=script.T), torch.Generator().manual_seed(0)
        zero = script.Zero(model, 3)
        losses.append([])
        for _ in range(3):
            x, y = script.own_share(bytes_to_learn(0), generator)
            zero.zero_grad()
            loss = model.loss(x, y)
            loss.backward()
            if evaluate:
                with torch.no_grad():
                    model.loss(x, y)
                model.loss(x, y)  # whose backward never comes
            zero.step()
            losses[-1].append(loss.item())
        held.append(zero.held())
    return *losses, *held


def norm_of_shards(script, values):
    """The norm of a gradient of which each rank has one number, the others being 0."""
    zero = script.Zero(common.GPT(4, 1, T=script.T), 2)
    for unit in zero.units:
        unit.gradient = torch.zeros(unit.length // zero.world)
    zero.units[0].gradient[0] = values[zero.rank]
    return zero.gradient_norm()


def through_the_library(script, way, d, seed):
    script.SMALL = (d, 1)
    data, world = bytes_to_learn(seed), dist.get_world_size()
    torch.manual_seed(seed)
    expected = script.adam_alone(common.GPT(d, 1, T=script.T), data, 3, world, seed)
    run = script.library_run(way, data, 3, seed, torch.device("cpu"))
    gradient = (run["gradient"] - expected["gradient"]).abs().max() / expected["gradient"].abs().max()
    result = (
        [script.furthest(run, expected, what) for what in ("losses", "norms")],
        gradient.item(),
        run["rest"],
    )
    gc.collect()
    return result


def averaging(script):
    """(does reduce-scatter average, and is a sum seen)."""
    found, scatter = [script.averages(torch.device("cpu"))], script.scatter_into
    script.scatter_into = lambda out, x, op: scatter(out, x, op=dist.ReduceOp.SUM)
    found.append(script.averages(torch.device("cpu")))
    script.scatter_into = scatter
    return found
