"""Numbered scripts cannot be imported by name: `load_script` does it. The rest runs them as a user would."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
settings.register_profile("here", deadline=None, max_examples=40)
settings.load_profile("here")


def load_script(name: str):
    """The script as a module, registered so that its functions and classes can be pickled."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def command(script: str, *arguments) -> list[str]:
    return [sys.executable, str(ROOT / script), *map(str, arguments)]


def run_script(script: str, *arguments, cwd, timeout=120, **environment) -> subprocess.CompletedProcess:
    """Run a script from another directory, without a display."""
    env = {k: v for k, v in os.environ.items() if k != "DISPLAY"} | environment
    return subprocess.run(
        command(script, *arguments), cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True
    )


def processes_with(text: str) -> list[int]:
    """Ids of the processes whose environment or command line has `text` in it (Linux)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = "State:\tZ" not in (folder / "status").read_text()
            if alive and any(
                text.encode() in (folder / file).read_bytes() for file in ("cmdline", "environ")
            ):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


class Ranks:
    """Four processes that play ranks, case after case: `ranks(world, script, function of workers, ...)`."""

    def __init__(self):
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        self.case, self.pipes = 0, []
        for rank in range(4):
            ours, theirs = spawn.Pipe()
            serve = importlib.import_module("workers").serve
            spawn.Process(target=serve, args=(rank, self.store.port, theirs), daemon=True).start()
            self.pipes.append(ours)

    def __call__(self, world: int, script: str, function: str, *args) -> list:
        """What each of `world` ranks returned; raises what the first of them raised."""
        self.case += 1
        for pipe in self.pipes[:world]:
            pipe.send((self.case, world, script, function, args))
        results = []
        for pipe in self.pipes[:world]:
            assert pipe.poll(60), f"{function}: a rank does not answer"
            results.append(pipe.recv())
        for kind, result in results:
            if kind == "raised":
                raise result
        return [result for _, result in results]


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks()
    yield pool
    for pipe in pool.pipes:
        pipe.send(None)


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run on one thread and leave the matmul precision as it was."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
