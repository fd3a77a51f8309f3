"""What every script needs and no lesson teaches: corpus, batches, GPT, device, clock, saving, processes.

Importing it trains, reads and prints nothing. Notation: `B` sequences in a batch, `T` tokens in a sequence,
`V` vocabulary, `d` width, `L` layers, `h` heads, `N` non-embedding parameters.
"""

import argparse
import functools
import gc
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import platform
import re
import signal
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

V = 256  # vocabulary: one token a byte, so that no tokenizer is needed


# %% Command line
class BadInput(Exception):
    """What the user gave cannot be used."""

    code = 2


class CheckFailed(Exception):
    """A check of the script failed, or one of its processes did."""

    code = 1


def run(main) -> None:
    """Call `main()` and exit: 0 done, 1 check failed, 2 bad input, 130 Ctrl-C; bad news takes one line."""
    code = 0
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `| head` has seen enough; what had to be saved was saved before it was printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, CheckFailed, OSError) as error:  # OSError: a full disk, say
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        code = getattr(error, "code", 1)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """The flags that every script has; a bad one is told in one line."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--quick", action="store_true", help="every section, in seconds")
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
        self.add_argument("--out", default=Path("out"), type=Path, metavar="DIR", help="default: out")
        self.add_argument("--seed", default=0, type=natural, help="default: 0")

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def natural(text: str, least: int = 0) -> int:
    """argparse type: a whole number from `least` to what the generators of random numbers take as a seed."""
    if not (text.isdecimal() and text.isascii() and least <= int(text[:20]) < 2**62):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least {least}")
    return int(text)


positive = functools.partial(natural, least=1)


# %% Corpus and batches
def read_corpus(path: Path | None = None) -> tuple[bytes, str]:
    """(bytes, what they are): the standard library's sorted top-level `*.py`, or a file, or a folder's files.

    A byte is a token, so any text in any language will do; hidden files and folders are passed over.
    Raises BadInput when there is nothing to read.
    """
    root = path or Path(sysconfig.get_paths()["stdlib"])
    try:
        found = [root] if root.is_file() else sorted(root.glob("*.py") if path is None else root.rglob("*"))
        hidden = [any(part.startswith(".") for part in file.relative_to(root).parts) for file in found]
        files = [file for file, no in zip(found, hidden, strict=True) if file.is_file() and not no]
        text = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise BadInput(f"corpus: cannot read {error.filename}: {error.strerror}") from None
    if not text:
        found = f"0 bytes in {len(files)} files" if root.exists() else "no such file or folder"
        needed = "library sources, or your own text with --corpus PATH" if path is None else "some text"
        raise BadInput(f"corpus {root}: found {found}, need {needed}")
    name = "Python standard-library source" if path is None else root.resolve().name
    return text, f"{name} ({len(files)} files, sha256 {hashlib.sha256(text).hexdigest()[:8]})"


def split_corpus(text: bytes, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, val), uint8: the first 95 % of the bytes and the rest. Raises BadInput if val is too short."""
    if len(text) < 20 * (T + 2):
        raise BadInput(f"corpus: found {len(text):,} bytes, need {20 * (T + 2):,} for windows of {T} tokens")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = int(0.95 * len(data))
    return data[:split], data[split:]


def batch(data: torch.Tensor, B: int, T: int, generator: torch.Generator):
    """(x, y), each (B, T) int64 where `data` is: B random windows, and the same moved on by one token."""
    starts = torch.randint(0, len(data) - T - 1, (B, 1), generator=generator)
    windows = data[(starts + torch.arange(T + 1)).to(data.device)].long()  # (B, T+1)
    return windows[:, :-1], windows[:, 1:]


# %% The model
class Block(nn.Module):
    """Pre-norm transformer block; its matrices hold 12 d^2 weights."""

    def __init__(self, d: int, h: int, T: int):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.register_buffer("mask", torch.full((T, T), -math.inf).triu(1), persistent=False)

    def attention(self, q, k, v):  # each (B, h, T, d/h)
        if q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # On a CPU at this T plain matmuls beat the fused kernel, and the FLOP counter sees them.
        T, width = q.shape[-2:]
        scores = q @ k.mT * width**-0.5 + self.mask[:T, :T]  # (B, h, T, T)
        return scores.softmax(-1) @ v

    def forward(self, x):  # (B, T, d)
        B, T, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.attention(q, k, v).transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Byte-level GPT: (B, T) tokens to (B, T, V) logits. N = 12 L d^2, the weights of its blocks."""

    def __init__(self, d: int, L: int, h: int = 4, T: int = 64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, d), nn.Embedding(T, d)
        self.blocks = nn.Sequential(*[Block(d, h, T) for _ in range(L)])
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, V, bias=False)

    def forward(self, x):
        return self.head(self.ln(self.blocks(self.tok(x) + self.pos.weight[: x.shape[1]])))

    def loss(self, x, y):
        """Mean cross-entropy, nats a token."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


# %% Device, precision, clock
def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises BadInput if `cuda` is asked for in vain."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def set_precision(precision: str, device: torch.device) -> None:
    """tf32 rounds the inputs of float32 matmuls, to TF32 on a GPU and to bf16 on a CPU; fp32, bf16 do not."""
    reduced = "high" if device.type == "cuda" else "medium"
    torch.set_float32_matmul_precision(reduced if precision == "tf32" else "highest")


def autocast(precision: str, device: torch.device):
    """Context of a forward pass: in bf16, matmuls take and give bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def choose_precision(name: str, device: torch.device) -> tuple[str, str]:
    """(precision, reason), from a probe of matmuls on one thread.

    `auto` on a GPU is tf32. On a CPU it is bf16 if that runs 2.5 times as fast as fp32 (vector units give 2
    at most, a matrix unit like AMX more, and only more pays for the conversions), else tf32 if that runs 1.2
    times as fast, else fp32. Raises BadInput for a tf32 that is not there.
    """
    if name == "fp32":
        return name, "as asked"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def speed_up(precision, n):
        a = torch.ones(n, n, device=device).cumsum(0).sqrt()
        inputs = {"fp32": a, precision: a.bfloat16() if precision == "bf16" else a}
        products = {p: torch.empty_like(x) for p, x in inputs.items()}
        seconds = dict.fromkeys(inputs, math.inf)
        for p in [*inputs] * 20:  # in turn, and the best: noise only ever slows down
            set_precision(p, device)
            multiply = functools.partial(torch.mm, inputs[p], inputs[p], out=products[p])
            seconds[p] = min(seconds[p], measure(multiply, device, repeats=3))
        if name == "tf32" and torch.equal(*products.values()):
            raise BadInput("--precision tf32: this machine has no reduced-precision float32 matmul; use fp32")
        return seconds["fp32"] / seconds[precision]

    n = 2048 if device.type == "cuda" else 256  # small: without units for it, bf16 can be 500 times slower
    choice, kind = ("tf32" if name == "auto" else name), "TF32" if device.type == "cuda" else "bf16"
    gain = speed_up(choice, n)
    if name == "auto" and gain < 1.2:
        choice = "fp32"
    elif name == "auto" and device.type == "cpu" and (bf16 := speed_up("bf16", 512)) >= 2.5:
        choice, gain = "bf16", bf16
    torch.set_num_threads(threads)
    return choice, f"{kind} matmuls probed at {gain:.1f}x the speed of fp32"


def measure(function, device: torch.device, repeats: int = 15, warm_up: int = 2) -> float:
    """Median seconds of `repeats` calls after `warm_up` more, the device synchronised around each."""
    seconds = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[warm_up:])


def cgroup_limits(controller: str, version_2: tuple, version_1: tuple, root: Path = Path("/")):
    """For each level of this process's cgroups that has the files: the numbers in them. "max" is no limit."""
    groups, top = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)  # version 2 "0::/path", version 1 "4:cpu,cpuacct:/path"
        if controllers and controller not in controllers.split(","):
            continue
        group = top / (controller if controllers else "") / path.lstrip("/")
        files = version_1 if controllers else version_2
        for folder in (group, *group.parents):  # a container may be told the host's path: try those above
            try:
                numbers = [int(n) for file in files for n in (folder / file).read_text().split()]
            except (OSError, ValueError):  # no such file; or "max 100000": no limit at this level
                continue
            if numbers:
                yield numbers


def usable_cpus(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, cut to its cgroups' CPU quota, rounded down; at least 1.

    In a container `os.cpu_count()` shows the host's cores; threads beyond the quota are throttled, not run.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    files = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas = [quota // period for quota, period in cgroup_limits("cpu", *files, root) if quota > 0]
    return max(1, min([cpus, *quotas]))


def usable_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that this process may still take: of the GPU, or what the system has free, cut to its cgroups."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    info, free = root / "proc/meminfo", 4 * 2**30  # where nothing can be read: a small laptop's
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    limits = cgroup_limits("memory", ("memory.max",), ("memory.limit_in_bytes",), root)
    return min([free, *(limit for (limit,) in limits)])


def machine(device: torch.device) -> dict:
    """What the numbers are measured on, for the JSON."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "") or [
        platform.machine()
    ]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    versions = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.system()}
    return {"cpu": names[0], "usable_cpus": usable_cpus(), "gpu": gpu, **versions, "date": f"{date.today()}"}


def header(
    device: torch.device, precision: str, reason: str, threads: int, seed: int, ranks: str = ""
) -> str:
    """The first lines that a script prints."""
    m = machine(device)
    first = f"{device.type}: {m['gpu'] or m['cpu']} | {precision} | torch {m['torch']} | {threads} threads"
    return f"{first}{ranks} | seed {seed}\n{precision}: {reason} | Python {m['python']} | {m['date']}"


# %% Printing and saving
@dataclass(frozen=True)
class Table:
    """Columns to print, records to save. `head` and `formats` are split at "|"; a None prints as "-"."""

    title: str
    head: str
    formats: str
    rows: list[tuple]
    notes: str = ""

    def records(self) -> list[dict]:
        """A dictionary a row, numbers unrounded. A head that occurs twice is told by the one before it."""
        heads, names, last = self.head.split("|"), [], ""
        for head in heads:
            last = head if heads.count(head) == 1 else last
            names.append(head if heads.count(head) == 1 else f"{last}, {head}")
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def __str__(self):
        formats, lines = self.formats.split("|"), [self.head.split("|")]
        for row in self.rows:
            lines.append(["-" if x is None else format(x, f) for x, f in zip(row, formats, strict=True)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title]
        for first, *others in lines:  # the first column to the left, the others to the right
            cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
            text.append("  ".join(["", first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join([*text, *(f"  {line}" for line in self.notes.splitlines())])


def writable(folder: Path) -> Path:
    """`folder`, made if need be. Raises BadInput, before any work, if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadInput(f"--out: cannot write to {folder}: {error.strerror}") from None
    return folder


def write(path: Path, data: bytes) -> None:
    """Write a file that no crash leaves half done: a temporary file beside it, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_json(path: Path, results: dict) -> None:
    """Raises ValueError on NaN and infinity: neither is a result."""
    write(path, (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())


def save_results(args, device: torch.device, results: dict, tables: list[Table] = ()) -> None:
    """NAME.json in the output folder: results, each table by its title, the machine and the arguments."""
    for table in tables:
        title = table.title.rstrip(":")
        results[title] = table.records()
        if table.notes:
            results[f"{title}, notes"] = table.notes.splitlines()
    results |= {"machine": machine(device)}
    results |= {"args": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    save_json(args.out / f"{Path(sys.argv[0]).stem}.json", results)


def save_figure(path: Path, figure) -> None:
    """`figure`: a `matplotlib.figure.Figure` made without pyplot, which needs no display."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write(path, buffer.getvalue())


# %% Processes
def run_processes(target, jobs: dict[str, tuple], tick=lambda: None) -> None:
    """Run `target(*args)` for each `name: args`, all at once, in new processes, until the last has ended.

    The first to fail ends the others: raises CheckFailed with its name. `tick` is called ten times a second.
    None outlives this call, whether it ends by return, exception, Ctrl-C, SIGTERM or SIGKILL. Keep `args`
    below a pipe's 64 kB: we would wait forever for a child that died before it had read more.
    """
    script = getattr(sys.modules["__main__"], "__file__", "")
    if target.__module__ == "__main__" and not Path(script).is_file():
        raise BadInput("new processes must import this code: save it as a .py file and run that")
    # glibc gives freed memory back to the kernel, and the next step faults it in again: let it keep that.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    spawn = multiprocessing.get_context("spawn")
    alive = [spawn.Process(target=_child, args=(target, args), name=name) for name, args in jobs.items()]
    on_int = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it: we hear Ctrl-C and end them
    on_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for process in alive:
            process.start()
        signal.signal(signal.SIGINT, on_int)
        while alive:
            ended = wait([process.sentinel for process in alive], timeout=0.1)
            tick()
            ended = [process for process in alive if process.sentinel in ended]
            for process in ended:
                process.join()
                alive.remove(process)
            # One that has lost its peer ends with 1: the one to name is the other.
            for process in sorted(ended, key=lambda process: process.exitcode == 1):
                if code := process.exitcode:
                    cause = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
                    raise CheckFailed(f"{process.name} died ({cause}); the others were stopped")
    finally:
        for process in alive:
            if process.pid:
                process.kill()
                process.join()
        signal.signal(signal.SIGINT, on_int)
        signal.signal(signal.SIGTERM, on_term)


def _child(target, args):
    def follow():  # the parent to its end, even if that is SIGKILL
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    try:
        target(*args)
    except (CheckFailed, OSError) as error:
        sys.exit(f"{multiprocessing.current_process().name}: {error}")
    except RuntimeError as error:
        if "Connection" not in str(error):
            raise
        sys.exit(f"{multiprocessing.current_process().name}: lost its connection to another rank")


def choose_backend(device: torch.device, local_ranks: int) -> tuple[str, str]:
    """(nccl | gloo, reason): NCCL needs a GPU for every rank of this machine."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus >= local_ranks and dist.is_nccl_available():
        return "nccl", "a GPU for every rank"
    return "gloo", f"{gpus} GPUs for {local_ranks} ranks"


def torchrun() -> tuple[int, int, int, int] | None:
    """(rank, world, local rank, ranks of this machine) if torchrun started this process, else None."""
    if "RANK" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise BadInput(f"RANK is set but {', '.join(missing)} is not: start under torchrun, or unset RANK")
    return tuple(int(os.environ[name]) for name in names[:4])


def launch(worker, ranks: int, device: torch.device, *args):
    """Run `worker(rank, world, device, *args)` on `ranks` new processes, or in the ranks that torchrun made.

    In there the default process group is up, `device` is the rank's own, its threads are its share of cores.
    Returns what rank 0 returned, and None in the other ranks of torchrun.
    """
    if here := torchrun():
        return _rank(worker, *here, device, None, args)
    # The kernel picks the store's port, and this process keeps it: nobody can take it in between.
    store = _store(0, is_master=True, wait_for_workers=False)
    jobs = {f"rank {r}": (worker, r, ranks, r, ranks, device, store.port, args) for r in range(ranks)}
    run_processes(_rank, jobs)
    return pickle.loads(store.get("result"))


def _store(port: int, **options):
    return dist.TCPStore("127.0.0.1", port, use_libuv=sys.platform != "win32", **options)


def _rank(worker, rank, world, local_rank, local_world, device, port, args):
    torch.set_num_threads(max(1, usable_cpus() // local_world))
    backend, _ = choose_backend(device, local_world)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == local_world:  # one machine: what its name resolves to, if to anything, does not matter
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "::1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = port and _store(port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    result = worker(rank, world, device, *args)
    gc.collect()  # a cycle, such as DDP's, would keep the group and its threads until the interpreter is gone
    dist.destroy_process_group()  # not after an exception: we would wait for peers that wait for us
    if store and rank == 0:
        store.set("result", pickle.dumps(result))
    return result if rank == 0 else None
