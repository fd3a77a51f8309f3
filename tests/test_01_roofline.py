import json
import math
import re
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, load_script, run_script
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

import common

roofline = load_script("01_roofline")
from script_01_roofline import Point, Roofs, Work  # noqa: E402

CPU = torch.device("cpu")
sides = st.integers(1, 40)


# The arithmetic
def counted(function, *inputs) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


@given(sides, sides, sides, st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_matmul_is_what_is_counted(m, k, n, dtype):
    a, b = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
    work = roofline.matmul(m, k, n, dtype.itemsize)
    assert work.flops == counted(torch.mm, a, b)
    assert work.bytes == a.nbytes + b.nbytes + (a @ b).nbytes


def test_intensities_of_the_source():
    works = [roofline.matmul(n, n, n, 4) for n in (32, 128, 512, 2048)]
    assert [f"{work.intensity:.1f}" for work in works] == ["5.3", "21.3", "85.3", "341.3"]
    assert roofline.elementwise(32_000_000, 4, inputs=2) == Work(32_000_000, 12 * 32_000_000)
    ridges = [round(roofline.ridge(name)) for name in ("A100", "H100", "H200", "B200")]
    assert ridges == [153, 295, 206, 281]


def test_bf16_is_twice_tf32_and_16_times_fp32():
    a100, h100 = roofline.GPUS["A100"], roofline.GPUS["H100"]
    assert a100["bf16"] / a100["fp32"] == 16 and a100["bf16"] / a100["tf32"] == 2
    assert 2 * h100["tf32"] == pytest.approx(h100["bf16"], rel=1e-3) and h100["fp8"] == pytest.approx(1979)


def test_normalisations_counted_by_hand():
    class Number(float):  # counts what is done to it
        done = 0

        def __add__(self, other):
            Number.done += 1
            return Number(float(self) + other)

        def __sub__(self, other):
            Number.done += 1
            return Number(float(self) - other)

        def __mul__(self, other):
            Number.done += 1
            return Number(float(self) * other)

    rows, d = 3, 7
    x = [[Number(i * j % 5 + 1) for j in range(d)] for i in range(rows)]
    for row in x:
        total = Number(0)
        for number in row:
            total = total + number
        centred = [number - total / d for number in row]
        variance = Number(0)
        for number in centred:
            variance = variance + number * number
        scale = 1 / math.sqrt(variance / d + 1e-5)
        centred = [number - total / d for number in row]  # a second look, as one pass keeps nothing
        assert [number * scale * 2.0 + 1.0 for number in centred]
    work = roofline.layer_norm(rows, d, 2)
    assert work.flops == Number.done
    assert work.bytes == 2 * (rows * d + rows * d + d + d)
    assert roofline.softmax(rows, d, 4) == Work(5 * rows * d, 4 * 2 * rows * d)


@given(st.integers(1, 3), st.integers(1, 9), st.sampled_from(((8, 2), (12, 3), (4, 1))))
def test_attention_at_decode_is_what_is_counted(B, T, dims):
    d, h = dims
    q, k, v = torch.ones(B, h, 1, d // h), torch.ones(B, h, T, d // h), torch.ones(B, h, T, d // h)
    work = roofline.attention_decode(B, T, d, h, 4)
    assert work.flops == counted(lambda: (q @ k.mT).softmax(-1) @ v) + 5 * B * h * T
    assert work.bytes == k.nbytes + v.nbytes + 2 * q.nbytes


@given(st.integers(1, 9), st.integers(1, 4))
def test_attention_at_prefill_counts_the_pairs_that_are_not_masked(T, h):
    d = 8 * h
    pairs = int(torch.ones(T, T).tril().sum())
    work = roofline.attention_prefill(T, d, h, 2)
    assert work == Work(pairs * (2 * d + 2 * d + 5 * h), 2 * 4 * T * d)


@given(st.integers(1, 20), st.integers(1, 20))
def test_mlp_counts_three_kernels(tokens, d):
    x, up, down = torch.ones(tokens, d), torch.ones(4 * d, d), torch.ones(d, 4 * d)
    hidden = F.linear(x, up)
    work = roofline.mlp(tokens, d, 4)
    assert work.flops == counted(lambda: F.linear(F.linear(x, up), down)) + hidden.numel()
    assert work.bytes == 2 * x.nbytes + up.nbytes + down.nbytes + 4 * hidden.nbytes


# Tiles
@given(sides, sides, sides, st.integers(1, 50), st.sampled_from((np.float32, np.float64)))
def test_tiled_matmul_equals_numpy_and_its_bytes_the_formula(m, k, n, b, dtype):
    A, B = (np.random.default_rng(m * k + n).standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    C, moved = roofline.tiled_matmul(A, B, b)
    np.testing.assert_allclose(C, A @ B, rtol=1e-4, atol=1e-4 if dtype == np.float32 else 1e-12)
    assert C.dtype == dtype and moved == roofline.tiled_bytes(m, k, n, b, A.itemsize)
    once = roofline.matmul(m, k, n, A.itemsize).bytes
    assert moved >= once and (moved == once or b < max(m, n))


@given(st.integers(1, 600), st.sampled_from((1, 2, 4, 8)))
def test_a_square_tile_does_b_over_s(b, s):
    assert roofline.tile_intensity(b, b, s) == pytest.approx(b / s)
    n, k = 3 * b, 10**9 * b  # the output, left out of b / s, vanishes beside long strips
    assert 2 * n * n * k / roofline.tiled_bytes(n, k, n, b, s) == pytest.approx(b / s, rel=1e-6)


def test_a_wrong_byte_or_product_is_a_failed_check(monkeypatch):
    assert roofline.count_tiles(40, (7, 40), seed=0)
    right = roofline.tiled_matmul
    monkeypatch.setattr(roofline, "tiled_matmul", lambda A, B, b: (right(A, B, b)[0], 1))
    with pytest.raises(common.CheckFailed, match="1 bytes"):
        roofline.count_tiles(40, (7,), seed=0)
    monkeypatch.setattr(roofline, "tiled_matmul", lambda A, B, b: (A * np.nan, right(A, B, b)[1]))
    with pytest.raises(common.CheckFailed, match="wrong product"):
        roofline.count_tiles(40, (7,), seed=0)


# Roofs
def point(group, work, seconds, precision="fp32", name=""):
    return Point(group, name, work, None, precision, seconds=seconds)


ROOFS = Roofs(
    [
        point("matmul", Work(1000, 100), 1.0),
        point("matmul", Work(4000, 400), 2.0),
        point("matmul", Work(9000, 900), 1.0, "bf16"),
        *(point("stream", Work(0, size), size / rate) for size, rate in
          ((4, 10), (8, 90), (12, 80), (400, 30), (800, 50), (1200, 20))),
    ]
)  # fmt: skip


def test_roofs_are_the_best_that_was_measured():
    assert (ROOFS.peak("fp32"), ROOFS.peak("bf16")) == (2000, 9000)
    assert [ROOFS.bandwidth(size) for size in (1, 16, 20, 100, 800, 1e9)] == [90, 90, 80, 50, 50, 50]
    in_place = Roofs([*ROOFS.points[:-1], replace(ROOFS.points[-1], footprint=4)])
    assert in_place.bandwidth(math.inf) == 90  # the longest arrays would all fit where 4 bytes do
    assert ROOFS.ridge("fp32") == 40
    assert ROOFS.least(point("", Work(1000, 1000), math.nan)) == 20  # memory
    assert ROOFS.least(point("", Work(10**6, 1000), math.nan)) == 500  # arithmetic


@given(st.floats(0, 1e6), st.floats(1, 1e3))
def test_a_smaller_set_is_never_further_away(size, factor):
    assert ROOFS.bandwidth(size) >= ROOFS.bandwidth(size * factor)


def test_a_point_above_its_roof_is_timed_again_and_then_told():
    roofs, work = ROOFS.points, Work(1000, 1000)  # 20 s at the least

    def settle(*times):
        times = iter(times)
        return roofline.settle(
            roofs, [point("", work, math.nan)], lambda p: p if p in roofs else replace(p, seconds=next(times))
        )

    found, points = settle(25.0)
    assert not found.above(points)
    found, points = settle(10.0, 25.0)
    assert not found.above(points) and points[0].seconds == 25
    for times in ([10.0, 11.0, 12.0, 13.0], [math.nan] * 4):
        found, points = settle(*times)
        assert found.above(points)


def test_a_roof_takes_the_better_of_its_medians():
    times = iter([2.0, *[1.0] * 50])
    slow, *others = [replace(p, seconds=1.0) for p in ROOFS.points]
    found, _ = roofline.settle([slow, *others], [], lambda p: replace(p, seconds=next(times)))
    assert all(p.seconds == 1.0 for p in found.points)


# What is timed
def test_layers_of_the_transformer_fit_the_memory_and_do_what_is_said():
    memory = roofline.attention_decode(16, 4, 256, 2, 4).bytes  # of 16 sequences, and not of 64
    points = roofline.transformer(256, 4, memory, "fp32", CPU)
    assert {p.name for p in points if p.group == "MLP decode"} == {"B=1", "B=4", "B=16"}
    assert {p.name for p in points if "prefill" in p.group} == {"T=16"}
    for p in points:
        result = p.call()
        assert result.isfinite().all() and result.std() > 0.01
    causal = next(p for p in points if p.group == "attention prefill").call
    q, k, v = causal.args
    scores = (q @ k.mT / math.sqrt(128)).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    torch.testing.assert_close(causal(), scores.softmax(-1) @ v)


@given(st.floats(1e-6, 1), st.floats(1e-8, 1e-2))
def test_crossover_is_where_the_floor_has_doubled(floor, slope):
    batches = (1, 4, 16, 64, 256)
    decode = [Point("MLP decode", f"B={B}", Work(1, 1), None, seconds=floor + slope * B) for B in batches]
    assert roofline.crossover(decode) == pytest.approx(floor / slope, rel=1e-4, abs=1e-4)


def test_streams_move_normal_numbers():
    for p in roofline.streams((8, 64), CPU):
        p.call()
        p.call()
        arrays = [a for a in getattr(p.call, "args", ()) if torch.is_tensor(a)]
        assert all(a.abs().min() >= 0.5 for a in arrays)


def test_without_a_compiler_the_chain_is_fused_in_place(monkeypatch):
    def no_compiler(function):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", no_compiler)
    points, told = roofline.fusions(1000, True, CPU)
    assert told == "not compiled: No working C++ compiler found"
    assert [p.work.bytes for p in points] == [32_000, 32_000, 8_000]
    monkeypatch.setattr(roofline, "chain_in_blocks", lambda out, x: out.fill_(1))
    with pytest.raises(common.CheckFailed, match="in blocks"):
        roofline.fusions(1000, False, CPU)


# The script
def test_quick_run(tmp_path):
    done = run_script("01_roofline.py", "--quick", "--gpu-specs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for n, intensity in ((32, "5.3"), (128, "21.3"), (512, "85.3")):
        assert (
            f"  n={n:>4}: " in done.stdout and f"arithmetic intensity {intensity:>6} FLOP/byte" in done.stdout
        )
    for words in (
        "elementwise add, 32M floats: ",
        "page faults",
        "ridge",
        "MLP decode",
        "in place, in blocks",
    ):
        assert words in done.stdout
    results = json.loads((tmp_path / "out/01_roofline.json").read_text())
    rows = next(rows for title, rows in results.items() if title.startswith("a transformer"))
    assert len(rows) == 18 and all(row["measured, us"] > 0 for row in rows)
    assert (tmp_path / "out/01_roofline.png").stat().st_size > 10_000


def test_without_bf16_units_it_is_skipped_with_the_reason(tmp_path):
    done = run_script("01_roofline.py", "--quick", cwd=tmp_path, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 0, done.stderr
    for name in ("tf32", "bf16", "fp16"):
        assert f"  {name} skipped: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4"], "unrecognized"),
        (["--out", "/proc/none"], "cannot write"),
        (["--seed", "-1"], "whole number"),
        (["--seed", "9" * 5000], "whole number"),
    ],
)
def test_bad_input_takes_one_line(arguments, message, tmp_path):
    done = run_script("01_roofline.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_the_recorded_run_shows_what_the_claims_say():
    recorded = json.loads((ROOT / "results/01_roofline.json").read_text())
    tables = {
        title.split(",")[0]: rows
        for title, rows in recorded.items()
        if isinstance(rows, list) and not title.endswith(", notes")
    }
    fp32 = next(row for row in tables["matmul"] if row[""] == "fp32")
    assert fp32["n=32"] < fp32["n=2048"] / 5
    ready, new = (float(re.search(r"([\d.]+) GB/s", line)[1]) for line in recorded["source"][-2:])
    assert ready > 2 * new
    layers = {(row[""], row["batch"]): row for row in tables["a transformer on it"]}
    assert all(row["ratio"] <= 1 + roofline.TOLERANCE for row in layers.values()) and len(layers) == 18
    assert all(layers["attention decode", f"B={B}"]["bound"] == "memory" for B in roofline.BATCHES)
    one, many = layers["MLP decode", "B=1"], layers["MLP decode", "B=256"]
    assert (one["bound"], many["bound"]) == ("memory", "compute")
    assert many["measured, us"] < 256 / 4 * one["measured, us"]
    chains = {
        row[""]: row for row in next(rows for title, rows in tables.items() if title.startswith("four"))
    }
    assert chains["compiled"]["speed-up"] > 1.5 and chains["a new array each"]["speed-up"] < 1


def test_too_little_memory_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(common, "usable_memory", lambda device: 10**9)
    monkeypatch.setattr("sys.argv", ["01_roofline.py", "--out", str(tmp_path)])
    with pytest.raises(common.BadInput, match=r"may use 1\.0 GB"):
        roofline.main()
    assert ROOT.is_dir() and not capsys.readouterr().out
