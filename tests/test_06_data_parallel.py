import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import ROOT, command, load_script, processes_with, run_script
from hypothesis import given, settings

import common

NAME = "06_data_parallel"
script = load_script(NAME)
worlds = st.integers(1, 4)


# The ring
@given(st.integers(0, 3000), st.integers(1, 70))
def test_chunk_bounds_partition_the_buffer(n, world):
    bounds = script.chunk_bounds(n, world)
    assert [i for start, end in bounds for i in range(start, end)] == list(range(n))
    sizes = [end - start for start, end in bounds]
    assert len(sizes) == world and max(sizes) - min(sizes) <= 1 and sizes[-1] == max(sizes)


@settings(max_examples=25)
@given(
    worlds,
    st.lists(st.one_of(st.sampled_from((1, 2, 3, 10, 1001)), st.integers(1, 400)), min_size=1, max_size=6),
    st.sampled_from((torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8)),
    st.integers(0, 1000),
)
def test_ring_equals_the_library_and_sends_what_is_predicted(ranks, world, sizes, dtype, seed):
    for of_a_size in zip(*ranks(world, NAME, "ring", sizes, dtype, seed), strict=True):
        total = 0
        for rank, (ours, library, sent) in enumerate(of_a_size):
            np.testing.assert_array_equal(ours, library)
            chunks = [end - start for start, end in script.chunk_bounds(ours.size, world)]
            kept = chunks[(rank + 1) % world] + chunks[(rank + 2) % world]  # one in each half is not sent on
            assert sent == (2 * ours.size - kept) * ours.itemsize
            if ours.size % world == 0:
                assert sent == 2 * (world - 1) * ours.nbytes // world
            total += sent
        assert total == 2 * (world - 1) * ours.nbytes
    if world > 1 and dtype == torch.float64:
        assert any(ours.any() for ours, _, _ in of_a_size) or ours.size < 9


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_messages_do_not_wait_for_each_other(ranks, world):
    numbers = 5_000_001  # 20 MB: no buffer of the system hides a send
    for difference, sent in ranks(world, NAME, "ring_of_large_floats", numbers):
        assert difference <= 2 * world * torch.finfo(torch.float32).eps
        assert abs(sent - 2 * (world - 1) / world * 4 * numbers) <= 8 * world


def test_a_buffer_that_is_not_contiguous_is_refused(ranks):
    for error, total in ranks(3, NAME, "ring_of_a_view"):
        assert "contiguous" in error
        np.testing.assert_array_equal(total, np.arange(12.0).reshape(3, 4).T * 6)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_picture_shows_two_halves(ranks, world):
    states = ranks(world, NAME, "holdings")[0]
    everyone = "".join(map(str, range(world)))
    assert len(states) == 2 * world - 1
    for rank in range(world):
        assert states[0][rank] == [str(rank)] * world
        assert states[world - 1][rank].count(everyone) == 1  # reduce-scatter is done
        assert states[-1][rank] == [everyone] * world
    last = script.picture(states).splitlines()[-1].split()
    assert last[:2] == ["rank", str(world - 1)] and last[-world:] == [everyone] * world
    assert script.draw(states).axes[-1].texts[0].get_text() == everyone


# Gradients
@settings(max_examples=25)
@given(worlds, st.data(), st.integers(0, 1000))
def test_token_weights_give_the_gradient_of_the_big_batch(ranks, world, data, seed):
    counts = data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world).filter(any))
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=sum(counts), max_size=sum(counts)))
    for weighted, _, expected in ranks(world, NAME, "gradients", counts, lengths, seed):
        assert np.isfinite(weighted).all() and np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(weighted, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_mean_of_means_is_not_the_mean(ranks):
    equal = ranks(2, NAME, "gradients", [2, 2], [8, 8, 8, 8], 0)[0]
    np.testing.assert_allclose(equal[1], equal[2], rtol=0, atol=1e-6)
    for counts, lengths in (([3, 1], [8] * 4), ([2, 2], [1, 1, 8, 8])):
        weighted, naive, expected = ranks(2, NAME, "gradients", counts, lengths, 0)[0]
        assert np.abs(naive - expected).max() > 0.05 * np.abs(expected).max()
        np.testing.assert_allclose(weighted, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_averaged_and_a_missing_one_is_zero(ranks, world):
    for one_by_one, in_a_row in ranks(world, NAME, "averaged"):
        weight, bias, sizes = one_by_one
        assert (weight == (world - 1) / 2).all() and (bias == 1).all() and sizes == [24, 8]
        weight, bias, sizes = in_a_row
        assert (weight == (world - 1) / 2).all() and sizes == [32]
        assert bias == pytest.approx((world - 1) / world)


@pytest.mark.parametrize(
    ("way", "right", "count"),
    [
        ("around both", True, 1),
        ("around backward", True, 4),
        ("not at all", True, 4),
        ("flag after forward", False, 1),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_accumulation(ranks, world, way, right, count):
    for error, all_reduces, spread in ranks(world, NAME, "accumulated", way):
        assert all_reduces == count
        assert (error <= 1e-5) if right else (error > 0.05)
        assert (spread <= 1e-7) if right else (spread > 1e-4)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_follow_the_curve_of_one(ranks, world):
    for together, alone in ranks(world, NAME, "curves", 8):
        assert len(together) == 8 and together[-1] < together[0] - 0.01
        np.testing.assert_allclose(together, alone, rtol=0, atol=script.LOSS_BOUND)


def test_a_check_fails_on_nan_and_says_what_it_got():
    script.check("x", 1.0, 1.0)
    for got in (1.1, math.nan, math.inf):
        with pytest.raises(common.CheckFailed, match=r"x: .* away, expected"):
            script.check("x", got, 1.0)
    nan = torch.tensor([1.0, math.nan])
    assert math.isnan(script.relative_error(nan, torch.ones(2)))


# The script
@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick")
    return run_script(f"{NAME}.py", "--quick", cwd=folder), folder


def test_quick_run(quick_run):
    done, folder = quick_run
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("data parallel on 4 processes"))
    assert line.endswith("over 84,288 gradient values")
    assert float(line.split(" = ")[1].split()[0]) < 1e-6
    for words in ("4 ranks, gloo (0 GPUs for 4 ranks)", "  rank 3  ", " 1.909\n", "at most", "speed-up"):
        assert words in done.stdout
    results = json.loads((folder / f"out/{NAME}.json").read_text())
    ring = next(rows for title, rows in results.items() if title.startswith("a ring by hand"))
    assert all(row["sent, mean of ranks"] == row["predicted"] for row in ring) and results["world"] == 4
    assert (folder / f"out/{NAME}.png").stat().st_size > 10_000


def test_two_agents_of_torchrun(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    agents = [start([*agent, *command(f"{NAME}.py", "--quick")[1:]], tmp_path) for _ in range(2)]
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    (quiet, _), (told, _) = sorted(outputs, key=lambda output: len(output[0]))
    assert quiet == "" and "data parallel on 2 processes: max |grad difference|" in told
    assert "2 ranks, gloo" in told and (tmp_path / f"out/{NAME}.json").exists()


def start(arguments, cwd, **environment):
    return subprocess.Popen(
        arguments,
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_ranks(mark, count):
    """The ids of the rank processes, once they all compute."""
    deadline = time.monotonic() + 60
    while True:
        pids = [
            pid for pid in processes_with(mark) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        if len(pids) == count and all(cpu_seconds(pid) > 1.5 for pid in pids):
            return pids
        assert time.monotonic() < deadline, "the ranks do not start"
        time.sleep(0.1)


def cpu_seconds(pid) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    mark = f"mark_{tmp_path.name}_{os.getpid()}"
    process = start(command(f"{NAME}.py", "--ranks", "3"), tmp_path, MARK=mark)
    victim = sorted(wait_for_ranks(mark, 3))[1]  # they were started in turn
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 1
    assert re.search(r"rank 1 died \(killed by SIGKILL\); the others were stopped$", err.splitlines()[-1])
    assert "Traceback" not in err
    time.sleep(0.5)
    assert not processes_with(mark)


def test_two_copies_at_once_and_a_child_that_gets_sigint(tmp_path):
    marks = [f"mark_{tmp_path.name}_{os.getpid()}_{i}" for i in range(2)]
    copies = [start(command(f"{NAME}.py", "--quick", "--ranks", "2"), tmp_path, MARK=mark) for mark in marks]
    os.kill(wait_for_ranks(marks[0], 2)[0], signal.SIGINT)  # the parent alone decides
    for copy in copies:
        out, err = copy.communicate(timeout=120)
        assert copy.returncode == 0 and "data parallel on 2 processes" in out, err


def test_ctrl_c_leaves_no_process(tmp_path):
    mark = f"mark_{tmp_path.name}_{os.getpid()}"
    process = subprocess.Popen(
        command(f"{NAME}.py", "--ranks", "2"), cwd=tmp_path, env=os.environ | {"MARK": mark},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_ranks(mark, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130 and err.splitlines()[-1].endswith("interrupted")
    time.sleep(0.5)
    assert not processes_with(mark)


def test_a_host_name_that_does_not_resolve_does_no_harm(tmp_path):
    inside = shlex.join(command(f"{NAME}.py", "--quick", "--ranks", "2"))
    alone = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c"]  # a host name of its own (Linux)
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no name spaces here")
    rename = "hostname no-such-host.invalid 2>&1 || exit 99"
    done = subprocess.run(
        [*alone, f"{rename}; {inside}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "data parallel on 2 processes" in done.stdout, done.stderr


def test_the_recorded_run_shows_what_the_claims_say():
    recorded = json.loads((ROOT / f"results/{NAME}.json").read_text())
    tables = {title.split(",")[0]: rows for title, rows in recorded.items() if ", notes" not in title}
    ways = {row[""]: row for row in tables["averaging the gradient of a larger model"]}
    assert (
        ways["an all-reduce a parameter"]["for averaging, ms"]
        > 2 * ways["one all-reduce for all"]["for averaging, ms"]
    )
    assert (
        1 < ways["DistributedDataParallel"]["all-reduces"] < ways["an all-reduce a parameter"]["all-reduces"]
    )
    scaling = tables["one step on the same batch by more ranks"]
    assert [row["ranks"] for row in scaling] == [1, 2, 4] and all(0.5 < row["ratio"] < 1.5 for row in scaling)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "at least 1"),
        (["--out", "/proc/none"], "cannot write"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_bad_input_takes_one_line(arguments, message, tmp_path):
    done = run_script(f"{NAME}.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
