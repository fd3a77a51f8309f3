import argparse
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import workers
from conftest import ROOT, processes_with
from hypothesis import assume, given

import common
from common import GPT, BadInput, CheckFailed, V, batch

CPU = torch.device("cpu")


# Model
@given(st.integers(1, 3), st.sampled_from((4, 8, 12, 32)), st.integers(1, 24), st.data())
def test_no_byte_changes_the_logits_before_it(L, d, T, data):
    t = data.draw(st.integers(0, T - 1))
    torch.manual_seed(0)
    model = GPT(d, L, T=24)
    x = torch.randint(0, V, (2, T))
    y = x.clone()
    y[:, t] = (y[:, t] + 1) % V
    before, after = model(x), model(y)
    assert before.isfinite().all() and before.shape == (2, T, V)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])


@given(st.integers(1, 4), st.integers(1, 16))
def test_parameters_are_12_L_d2_and_what_the_docstring_leaves_out(L, width):
    d, T = 4 * width, 16
    model = GPT(d, L, T=T)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert matrices == 12 * L * d * d
    biases_and_norms = L * (3 * d + d + 4 * d + d + 4 * d) + 2 * d
    assert sum(p.numel() for p in model.parameters()) == matrices + biases_and_norms + (V + T + V) * d


def test_attention_equals_the_library():
    torch.manual_seed(0)
    block = common.Block(32, 4, 64)
    q, k, v = torch.randn(3, 2, 4, 50, 8, dtype=torch.float64)
    library = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(block.attention(q, k, v), library, rtol=1e-12, atol=1e-12)


# Corpus and batches
@given(st.integers(20 * 9, 4000), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**31))
def test_batches_are_shifted_by_one_and_stay_in_their_split(size, T, B, seed):
    text = bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    train, val = common.split_corpus(text, T)
    assert bytes(train.tolist()) + bytes(val.tolist()) == text and len(train) == int(0.95 * size)
    for part in (train, val):
        x, y = batch(part, B, T, torch.Generator().manual_seed(seed))
        assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        for row in torch.cat([x, y[:, -1:]], 1).tolist():
            assert bytes(row) in bytes(part.tolist())


@given(st.integers(70, 5000), st.integers(1, 64), st.integers(1, 20), st.integers(0, 2**31))
def test_batches_draw_what_the_source_draws(size, T, B, seed):
    assume(size > T + 1)
    data = torch.arange(size) % 251
    ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
    for _ in range(3):
        x, y = batch(data.to(torch.uint8), B, T, ours)
        starts = torch.randint(0, len(data) - T - 1, (B,), generator=theirs)
        assert torch.equal(x, torch.stack([data[j : j + T] for j in starts]))
        assert torch.equal(y, torch.stack([data[j + 1 : j + T + 1] for j in starts]))


def test_corpus_of_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"zwei \xff")
    (tmp_path / "a.md").write_bytes(b"eins ")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"no")
    assert common.read_corpus(tmp_path)[0] == b"eins zwei \xff"
    assert common.read_corpus(tmp_path / "a.md")[0] == b"eins "
    text, name = common.read_corpus()
    assert len(text) > 1e6 and b"import" in text and re.search(r"\d+ files, sha256 [0-9a-f]{8}", name)


def test_a_corpus_that_cannot_serve_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "none").mkdir()
    with pytest.raises(BadInput, match="no such file or folder"):
        common.read_corpus(tmp_path / "missing")
    with pytest.raises(BadInput, match="0 bytes in 1 files"):
        common.read_corpus(tmp_path / "empty.txt")
    with pytest.raises(BadInput, match="0 bytes in 0 files"):
        common.read_corpus(tmp_path / "none")
    with pytest.raises(BadInput, match="found 1,319 bytes, need 1,320"):
        common.split_corpus(b"x" * 1319, 64)
    common.split_corpus(b"x" * 1320, 64)
    monkeypatch.setattr(common.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(BadInput, match=r"found 0 bytes in 0 files, need library sources, .* --corpus"):
        common.read_corpus()


# Device and precision
@pytest.mark.parametrize(("isa", "expected"), [("AVX2", ("fp32",)), ("AVX512_CORE", ("fp32", "tf32"))])
def test_without_bf16_units_auto_does_not_take_bf16(isa, expected):
    """With AVX512_CORE alone oneDNN still has kernels that beat the fp32 of another library on some CPUs."""
    code = (
        "import common, torch; cpu = torch.device('cpu')\n"
        "print(common.choose_precision('auto', cpu)[0])\n"
        "common.choose_precision('tf32', cpu)"
    )
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in expected
    if isa == "AVX2":
        assert "no reduced-precision float32 matmul" in done.stderr.splitlines()[-1]


def test_precisions_are_what_their_names_say():
    torch.manual_seed(0)
    a = torch.randn(64, 64)
    exact = a.double() @ a.double()
    for precision, bound in (("fp32", 1e-4), ("tf32", 0.1), ("bf16", 0.5)):
        common.set_precision(precision, CPU)
        with common.autocast(precision, CPU):
            product = a @ a
        assert product.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert (product.double() - exact).abs().max() < bound
    common.set_precision("fp32", CPU)
    assert common.choose_precision("fp32", CPU) == ("fp32", "as asked")
    assert common.choose_precision("auto", CPU)[0] in ("fp32", "tf32", "bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said():
    assert common.choose_device("auto") == CPU
    with pytest.raises(BadInput, match="no CUDA device"):
        common.choose_device("cuda")


def cgroup(root: Path, line: str, files: dict[str, str]) -> int:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return common.usable_cpus(root)


def test_memory_is_cut_to_the_cgroup(tmp_path):
    assert common.usable_memory(CPU, tmp_path) == 4 * 2**30
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 3000 kB\n")
    assert common.usable_memory(CPU, tmp_path) == 3000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/a")
    (tmp_path / "sys/fs/cgroup/a").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000000\n")
    assert common.usable_memory(CPU, tmp_path) == 1_000_000


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/", {"cpu.max": "max 100000\n"}, 12),
        ("0::/user/run", {"user/run/cpu.max": "max 100000", "user/cpu.max": "200000 100000"}, 2),
        ("0::/host/path/unseen", {"cpu.max": "300000 100000\n"}, 3),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 5),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 12),
        ("3:cpuset:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 12),
        ("0::/", {"cpu.max": ""}, 12),
        ("", {}, 12),
    ],
)
def test_usable_cpus_are_cut_to_the_quota(tmp_path, monkeypatch, line, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert cgroup(tmp_path, line, files) == expected


def test_usable_cpus_without_proc_or_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert common.usable_cpus(tmp_path) == 7


# Printing and saving
def test_a_table_prints_columns_and_saves_what_is_not_rounded(tmp_path):
    rows = [("one", 1234, 0.126), ("of two", 5, None)]
    table = common.Table("numbers:", "|count|share", "|,|.2f", rows, "a note\nof two lines")
    lines = ["numbers:", "          count  share", "  one     1,234   0.13", "  of two      5      -"]
    assert str(table).splitlines() == [*lines, "  a note", "  of two lines"]
    args = argparse.Namespace(out=tmp_path, seed=3)
    common.save_results(args, CPU, {"x": 1}, [table])
    saved = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert saved["numbers"] == [dict(zip(["", "count", "share"], row, strict=True)) for row in rows]
    assert saved["x"] == 1 and saved["args"] == {"out": str(tmp_path), "seed": 3}
    with pytest.raises(ValueError, match="argument"):
        str(common.Table("", "a|b", "|", [(1,)]))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    common.save_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        common.save_json(path, {"a": math.nan})

    def disk_full(*_):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, step, disk_full)
            common.save_json(path, {"a": 2})
        assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["results.json"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert common.writable(tmp_path / "new" / "one").is_dir()
    with pytest.raises(BadInput, match="cannot write"):
        common.writable(tmp_path / "file" / "inside")


# Processes
def test_the_first_failure_ends_the_others_and_is_named():
    jobs = {"the sleeper": (3600, 0), "the culprit": (0, 3)}
    with pytest.raises(CheckFailed, match=r"the culprit died \(exit code 3\)"):
        common.run_processes(workers.sleep_or_die, jobs)
    assert not multiprocessing.active_children()  # the sleeper was not waited for


def test_all_run_and_a_message_of_a_child_is_one_line(tmp_path, capfd):
    ticks = []
    common.run_processes(workers.touch, {n: (tmp_path / n,) for n in "abc"}, tick=lambda: ticks.append(1))
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"] and ticks
    with pytest.raises(CheckFailed, match="worker died"):
        common.run_processes(workers.fail_with, {"worker": ("it broke",)})
    assert capfd.readouterr().err == "worker: it broke\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_children_die_with_a_killed_parent(tmp_path):
    mark = f"mark_of_test_{os.getpid()}"
    code = "import common, workers; common.run_processes(workers.sleep_or_die, {n: (3600, 0) for n in 'ab'})"
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path, "MARK": mark}
    )
    wait_until(lambda: len(processes_with(mark)) >= 4)  # parent, resource tracker, two children
    time.sleep(4)  # the children have imported torch and sleep
    parent.kill()
    parent.wait()
    wait_until(lambda: not processes_with(mark))


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_launch_makes_ranks(tmp_path):
    returned = common.launch(workers.all_reduce, 3, CPU, tmp_path)
    threads = max(1, common.usable_cpus() // 3)
    seen = [(tmp_path / f"rank{r}").read_text() for r in range(3)]
    assert seen == [f"{r} 3 7 gloo {threads}" for r in range(3)] and returned == seen[0]


def test_launch_joins_the_ranks_of_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, ROOT / "tests/workers.py", tmp_path], check=True, timeout=90, capture_output=True
    )
    threads = max(1, common.usable_cpus() // 2)
    assert [(tmp_path / f"rank{r}").read_text() for r in range(2)] == [
        f"{r} 2 3 gloo {threads}" for r in range(2)
    ]


def test_a_dead_rank_ends_the_run_and_is_named(capfd):
    with pytest.raises(CheckFailed, match=r"rank 1 died \(exit code 86\)"):
        common.launch(workers.die, 2, CPU, 1)


def test_half_an_environment_of_torchrun_is_said(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(BadInput, match="MASTER_PORT"):
        common.launch(workers.all_reduce, 2, CPU, "")


# The house
def test_headers_and_requirements_agree():
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.M))
    scripts = sorted(ROOT.glob("[0-9][0-9]_*.py"))
    assert scripts and len(pins) == len((ROOT / "requirements.txt").read_text().split())

    def version(text):
        return tuple(map(int, text.split(".")))

    for script in scripts:
        block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script.read_text())
        assert block, f"{script.name} has no PEP 723 header"
        floors = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', block[1]))
        assert re.search(r'requires-python = ">=3\.\d+"', block[1])
        imported = set(
            re.findall(r"^\s*(?:import|from) (torch|numpy|matplotlib|tqdm)\b", script.read_text(), re.M)
        )
        assert set(floors) == imported | {"torch"}
        assert all(version(pins[name]) >= version(floor) for name, floor in floors.items())


def test_no_column_is_lost_when_heads_repeat():
    table = common.Table("", "n|a|ratio|b|ratio", "||||", [(1, 2, 3, 4, 5)])
    assert table.records() == [{"n": 1, "a": 2, "a, ratio": 3, "b": 4, "b, ratio": 5}]
    for script in ROOT.glob("[0-9][0-9]_*.py"):
        for heads in re.findall(r'head = "([^"]*[|][^"]+)"', script.read_text()):
            names = common.Table("", heads, "|" * heads.count("|"), [tuple(heads.split("|"))]).records()[0]
            assert len(names) == heads.count("|") + 1, heads


def test_every_script_has_its_results_and_its_row():
    readme, claims = (ROOT / "README.md").read_text(), (ROOT / "CLAIMS.md").read_text()
    for script in ROOT.glob("[0-9][0-9]_*.py"):
        text, recorded = ((ROOT / f"results/{script.stem}{kind}").read_text() for kind in (".txt", ".json"))
        assert json.loads(recorded)["machine"]["date"] in text.splitlines()[1]
        assert (ROOT / f"results/{script.stem}.png").read_bytes().startswith(b"\x89PNG")
        headline = re.search(rf"^\| \[`{script.name}`\].*\|(.*)\|.*\|$", readme, re.M)[1]
        numbers = re.findall(r"\d[\d.,e-]*\d", headline)
        assert numbers and all(number in text for number in numbers), headline
        assert f"`{script.name}`" in claims
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", claims))


def test_importing_common_does_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import common"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr, os.listdir(tmp_path)) == (0, b"", b"", [])
