"""Functions that new processes can import by name. Under torchrun: `workers.py FOLDER`."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

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


if __name__ == "__main__":
    common.run(lambda: common.launch(all_reduce, 2, torch.device("cpu"), sys.argv[1]))
