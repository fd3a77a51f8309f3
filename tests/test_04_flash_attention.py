import json
import math
import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import ROOT, load_script, run_script
from hypothesis import assume, example, given, settings

import common

script = load_script("04_flash_attention")
CPU = torch.device("cpu")


def reference(q, k, v, seen):
    """Attention in float64; seen (B, 1, n_q, n_k). No -inf anywhere: what is not seen has the weight 0."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    most = torch.where(seen, s, -1e30).detach().amax(-1, keepdim=True)
    w = torch.where(seen, s - most, 0).exp() * seen
    total = w.sum(-1, keepdim=True)
    return (w @ v) / torch.where(total > 0, total, 1)


def visible(n_q, n_k, causal, keep):
    """(B, 1, n_q, n_k), pair by pair."""
    pairs = [[not causal or j <= i + n_k - n_q for j in range(n_k)] for i in range(n_q)]
    return torch.tensor(pairs).reshape(1, 1, n_q, n_k) & keep[:, None, None]


def tensors(B, h, n_q, n_k, d, d_v, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v)
    return [torch.randn(B, h, *shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


lengths, widths, sides = st.integers(1, 130), st.sampled_from((1, 2, 5, 24, 63)), st.integers(1, 140)


# Forward and backward
@settings(max_examples=60)
@given(lengths, lengths, widths, widths, sides, sides, st.booleans(), st.sampled_from((0, 0.5, 0.95)))
@example(5, 2, 3, 3, 2, 2, True, 0)  # three queries that see no key
@example(1, 130, 63, 5, 32, 32, True, 0)  # decoding
@example(33, 33, 24, 24, 16, 16, True, 0.95)
def test_tiles_equal_the_reference(n_q, n_k, d, d_v, rows, columns, causal, hidden):
    assume(n_q * n_k / (rows * columns) < 2000)
    q, k, v, do = tensors(2, 2, n_q, n_k, d, d_v)
    keep = torch.rand(2, n_k, generator=torch.Generator().manual_seed(1)) >= hidden
    seen = visible(n_q, n_k, causal, keep)
    o, lse = script.flash_attention(q, k, v, causal, keep if hidden else None, rows, columns)
    right = reference(q, k, v, seen)
    torch.testing.assert_close(o, right, rtol=1e-10, atol=1e-10)
    s = (q @ k.mT / math.sqrt(d)).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(lse, s.logsumexp(-1), rtol=1e-10, atol=1e-10)
    empty = ~seen.any(-1).expand(2, 2, n_q)
    assert (o[empty] == 0).all() and torch.equal(lse == -math.inf, empty)
    ours, expected = (torch.autograd.grad(x, (q, k, v), do) for x in (o, right))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert (ours[0][empty] == 0).all()
    torch.testing.assert_close(script.naive(q, k, v, causal, keep if hidden else None), right)


@pytest.mark.parametrize("hide", [slice(0, 64), slice(0, 128), slice(64, 128)])
def test_whole_blocks_of_keys_may_be_masked(hide):
    q, k, v, do = tensors(1, 2, 40, 128, 8, 8)
    keep = torch.ones(1, 128, dtype=torch.bool)
    keep[:, hide] = False
    o, _ = script.flash_attention(q, k, v, True, keep, 16, 32)
    grads = torch.autograd.grad(o, (q, k, v), do)
    right = reference(q, k, v, visible(40, 128, True, keep))
    for a, b in zip((o, *grads), (right, *torch.autograd.grad(right, (q, k, v), do)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert not grads[1][:, :, hide].any() and not grads[2][:, :, hide].any()


def test_gradcheck_with_all_masks():
    q, k, v, _ = tensors(2, 1, 6, 5, 3, 2)
    keep = torch.tensor([[True, False, True, True, False], [False] * 5])
    assert torch.autograd.gradcheck(lambda *x: script.flash_attention(*x, True, keep, 2, 3)[0], (q, k, v))


@given(st.sampled_from((1e5, -1e5, 1e3)), lengths, sides, sides)
def test_a_shift_of_all_scores_changes_nothing(shift, n, rows, columns):
    q, k, v, do = tensors(1, 1, n, n, 16, 4)
    # One more coordinate, the same for all keys: it adds `shift` to each score. Width 17 has another scale.
    one = torch.ones(1, 1, n, 1, dtype=torch.float64)
    q2 = torch.cat([q * (17 / 16) ** 0.5, one], -1)
    k2 = torch.cat([k, one * math.sqrt(17) * shift], -1)
    plain, shifted = (
        script.flash_attention(a, b, v, True, None, rows, columns) for a, b in ((q, k), (q2, k2))
    )
    torch.testing.assert_close(plain[0], shifted[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(plain[1] + shift, shifted[1], rtol=1e-10, atol=1e-8)
    for a, b in zip(*(torch.autograd.grad(x[0], (q, k, v), do) for x in (plain, shifted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("factor", [30, 1e4])
def test_scores_of_any_size_stay_finite_in_float32(factor):
    q, k, v, do = tensors(1, 2, 70, 70, 8, 8, dtype=torch.float32)
    o, lse = script.flash_attention(factor * q, factor * k, v, True, None, 16, 16)
    grads = torch.autograd.grad(o, (q, k, v), do)
    assert all(x.isfinite().all() for x in (o, lse, *grads))
    if factor == 30:  # scores up to about 3,000, rounded by 1e-4
        exact = (x.double() for x in (factor * q, factor * k, v))
        right = reference(*exact, visible(70, 70, True, torch.ones(1, 70) > 0))
        torch.testing.assert_close(o.double(), right, rtol=1e-3, atol=1e-3)


@given(lengths, lengths, sides, sides, st.integers(0, 99))
def test_the_order_of_keys_does_not_matter_without_a_mask(n_q, n_k, rows, columns, seed):
    q, k, v, _ = tensors(1, 2, n_q, n_k, 6, 3)
    order = torch.randperm(n_k, generator=torch.Generator().manual_seed(seed))
    plain = script.flash_attention(q, k, v, False, None, rows, columns)
    moved = script.flash_attention(q, k[:, :, order], v[:, :, order], False, None, rows, columns)
    for a, b in zip(plain, moved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_last_query_is_level_with_the_last_key():
    seen = ~script.unseen(slice(0, 2), slice(0, 5), 3)
    assert seen.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert (~script.unseen(slice(0, 5), slice(0, 2), -3)).sum(1).tolist() == [0, 0, 0, 1, 2]
    blocks = list(script.tiles(5, 2, True, 2, 2))
    assert [I for I, _ in blocks] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert [Js for _, Js in blocks] == [[], [slice(0, 1)], [slice(0, 2)]]


@given(lengths, lengths, sides, sides)
def test_tiles_cover_what_is_seen_once(n_q, n_k, rows, columns):
    covered = np.zeros((n_q, n_k), int)
    for I, Js in script.tiles(n_q, n_k, True, rows, columns):
        for J in Js:
            covered[I, J] += 1
    seen = visible(n_q, n_k, True, torch.ones(1, n_k, dtype=torch.bool))[0, 0].numpy()
    assert covered.max(initial=0) <= 1 and (covered[seen] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_computed_in_32_bit(dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors(1, 2, 150, 150, 64, 64)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    o, lse = script.flash_attention(*inputs[:3], True, None, 32, 32)
    right = script.naive(*exact[:3], True)
    assert o.dtype == dtype and lse.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    assert (o - right).abs().max() <= eps / 2 * right.abs().max() * 1.01  # the rounding of the output alone
    ours = torch.autograd.grad(o, inputs[:3], inputs[3])
    for a, b in zip(ours, torch.autograd.grad(right, exact[:3], exact[3]), strict=True):
        assert a.dtype == dtype and (a - b).abs().max() <= 2 * eps * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_reach_into_the_tiles(dtype):
    inputs = [(4 * x.detach()).to(dtype).requires_grad_() for x in tensors(1, 2, 100, 100, 64, 64)]
    plain = script.tiled(*inputs[:3], True)
    grads = torch.autograd.grad(plain, inputs[:3], inputs[3], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = script.tiled(*inputs[:3], True)
        others = torch.autograd.grad(inside, inputs[:3], inputs[3])
    assert all(torch.equal(a, b) for a, b in zip((plain, *grads), (inside, *others), strict=True))


@pytest.mark.parametrize(
    "change", [{"q": torch.float64}, {"v": torch.float16}, dict.fromkeys("qkv", torch.int64)]
)
def test_dtypes_that_do_not_match_are_refused(change):
    q, k, v = (torch.ones(1, 1, 2, 2, dtype=change.get(name, torch.float32)) for name in "qkv")
    with pytest.raises(ValueError, match="floating dtype"):
        script.flash_attention(q, k, v)


@pytest.mark.parametrize(
    "change",
    [
        {"q": (1, 2, 3, 5)},
        {"k": (1, 1, 3, 4)},
        {"v": (1, 2, 4, 4)},
        {"q": (2, 3, 4)},
        dict.fromkeys("qk", (1, 2, 3, 0)),
        {"keep": (1, 4)},
    ],
)
def test_shapes_that_do_not_match_are_refused(change):
    shapes = {name: (1, 2, 3, 4) for name in "qkv"} | change
    keep = torch.ones(shapes.pop("keep"), dtype=torch.bool) if "keep" in shapes else None
    with pytest.raises(ValueError):
        script.flash_attention(*(torch.randn(shapes[name]) for name in "qkv"), keep=keep)


# Numpy, traffic
@given(lengths, lengths, widths, widths, sides, sides)
def test_one_head_in_numpy(n_q, n_k, d, d_v, rows, columns):
    q, k, v, _ = (x.detach() for x in tensors(1, 1, n_q, n_k, d, d_v))
    right = reference(q, k, v, visible(n_q, n_k, False, torch.ones(1, n_k) > 0))[0, 0].numpy()
    Q, K, V = (x[0, 0].numpy() for x in (q, k, v))
    O, O3, S = np.full((n_q, d_v), np.nan), np.full((n_q, d_v), np.nan), np.full((n_q, n_k), np.nan)
    script.flash_one_head(Q, K, V, O, rows, columns)
    script.attention_one_head(Q, K, V, S, O3, rows, columns)
    np.testing.assert_allclose(O, right, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(O3, right, rtol=1e-10, atol=1e-12)


def test_traffic_counted_by_hand():
    # n = 8, d = 2, tiles of 4 x 4. Tiles: Q 16, K and V twice 32 each, O 16 numbers.
    Q, K, V, O, S = (script.Slow(np.ones((8, width))) for width in (2, 2, 2, 2, 8))
    script.flash_one_head(Q, K, V, O, 4, 4)
    assert [x.bytes // 8 for x in (Q, K, V, O)] == [16, 32, 32, 16]
    # Three passes: S written, read, written, read, 64 numbers each.
    Q, K, V, O = (script.Slow(np.ones((8, 2))) for _ in range(4))
    script.attention_one_head(Q, K, V, S, O, 4, 4)
    assert [x.bytes // 8 for x in (Q, K, V, S, O)] == [16, 32, 32, 256, 16]


@settings(max_examples=20)
@given(st.integers(1, 90), st.integers(1, 16), st.floats(1, 100), st.booleans())
def test_counted_traffic_is_the_formula_and_blocks_fit(n, d, room, flash):
    M = int(room * 32 * d) + 64
    rows, columns = script.block_sizes(M, d, flash)
    held = rows * (2 * d + 2 if flash else d) + columns * (2 * d if flash else d) + rows * columns
    assert rows >= 1 and columns >= 1 and held <= M < held + 2 * d + 2 + columns
    assert script.counted_traffic(n, d, M, flash, 0) == 4 * script.traffic(n, d, M, flash)


def test_where_tiles_pay():
    for n in (512, 1024, 4096):
        assert script.traffic(n, 64, 2**10, True) > script.traffic(n, 64, 2**10, False)
        assert script.traffic(n, 64, 2**14, True) < script.traffic(n, 64, 2**14, False) / 2.5
    assert script.traffic(16, 64, 2**16, False) / script.traffic(16, 64, 2**16, True) == 1 + 16 / 64
    # Twice the memory, half the traffic, as long as keys pass by many times.
    a, b = (script.traffic(2**16, 64, M, True) for M in (2**14, 2**15))
    assert a / b == pytest.approx(2, rel=0.15)


def test_what_the_weights_weigh():
    assert script.weights_bytes(8192, 32) == pytest.approx(4.3e9, rel=2e-3)
    assert script.weights_bytes(131_072, 32) == pytest.approx(1.1e12, rel=2e-3)
    assert "makes 0.53." in script.source_lines(0)


# Memory and time
PEAK = """
import sys; sys.path[:0] = [{tests!r}, {root!r}]
import torch; torch.set_num_threads(1)
import common; from conftest import load_script
common.measure = lambda call, *_, **__: call() or 3  # one call is enough
script = load_script("04_flash_attention")
found = script.measure_point(script.{function}, {n}, list(script.MODES), 0, torch.device("cpu"))
print(*(peak for _, peak in found.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_tiles_is_linear_and_that_of_the_obvious_way_is_not():
    cases = ("tiled", 1024), ("tiled", 4096), ("naive", 512), ("naive", 2048)
    running = []
    for function, n in cases:
        code = PEAK.format(tests=str(ROOT / "tests"), root=str(ROOT), function=function, n=n)
        running.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
    peaks = [[int(word) for word in process.communicate(timeout=120)[0].split()] for process in running]
    for mode, a, b, c, d in zip(script.MODES, *peaks, strict=True):
        assert 0 < b <= 5 * a
        assert d > 7 * c > 0  # and not 16, as the allocator keeps pieces
        assert d == pytest.approx(script.predicted_peak("obvious way", mode, 2048, 4), rel=0.25)


def test_what_does_not_fit_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(common, "usable_memory", lambda device: 1000)
    bar = type("Bar", (), {"update": lambda self: None})()
    found, missing = script.measure_all((8192,), script.VERSIONS, 0, CPU, bar)
    assert not found and len(missing) == 6
    assert missing[1].startswith("obvious way, forward + backward, n = 8,192: takes 6.5 GB")
    lines = str(script.memory_table((8192,), found, 4, "\n".join(missing))).splitlines()
    assert lines[2].split()[-8:] == ["-", "4,378.9", "-", "-", "22.8", "-", "-", "-"]
    unread = {(name, mode, 8192): (1.0, None) for name in script.VERSIONS for mode in script.MODES}
    assert "-" in str(script.memory_table((8192,), unread, 4, "")) and script.draw((8192,), ["tiles"], unread)
    assert "-" in str(script.time_tables((8192,), list(script.VERSIONS), found)[0])


def test_quick_run(tmp_path):
    done = run_script("04_flash_attention.py", "--quick", "--out", str(tmp_path), cwd="/")
    assert done.returncode == 0, done.stderr
    for words in (
        "Max difference",
        "bytes counted",
        "forward + backward, ms",
        "peak memory",
        "Triton kernel",
    ):
        assert words in done.stdout
    results = json.loads((tmp_path / "04_flash_attention.json").read_text())
    (row,) = results["forward, ms"]
    assert row["obvious way"] > 0 and row["tiles"] > 0 and row["library"] > 0
    assert (tmp_path / "04_flash_attention.png").read_bytes()[:4] == b"\x89PNG"


def test_the_recorded_run_shows_what_the_claims_say():
    results = json.loads((ROOT / "results/04_flash_attention.json").read_text())
    at = {mode: {row["n"]: row for row in results[f"{mode}, ms"]} for mode in script.MODES}
    row = at["forward"]["4,096"]
    assert row["obvious way"] / row["tiles"] >= 4 and row["tiles"] / row["library"] <= 1.6
    memory = {row["n"]: row for row in results["peak memory on top of the inputs, MB"]}
    for mode in script.MODES:
        row = memory[f"{mode}, 4,096"]
        assert row["tiles"] <= row["obvious way"] / 16
        gains = [row["obvious way"] / row["tiles"] for row in at[mode].values()]
        assert gains[0] < 2 < gains[-1]


TRITON = """
import sys; sys.path[:0] = [{tests!r}, {root!r}]
import torch; from conftest import load_script
script = load_script("04_flash_attention")
for n_q, n_k, d, causal, dtype in {cases}:
    q, k, v = (torch.randn(2, 2, n, d).to(getattr(torch, dtype)) for n in (n_q, n_k, n_k))
    o, lse = script.flash_triton(q, k, v, causal, 32, 16)
    right, right_lse = script.flash_attention(q.double(), k.double(), v.double(), causal)
    bound = 1e-6 if dtype == "float32" else 2e-3
    assert (o - right).abs().max() <= bound, (n_q, n_k, d, causal, dtype)
    assert torch.equal(lse == -torch.inf, right_lse == -torch.inf)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
"""


def test_the_triton_kernel_in_its_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    cases = [(7, 7, 5, True, "float32"), (70, 40, 16, True, "float32"), (1, 65, 64, True, "float32")]
    cases += [(33, 49, 63, False, "float32"), (50, 70, 64, True, "float16")]  # numpy has no bf16
    code = TRITON.format(tests=str(ROOT / "tests"), root=str(ROOT), cases=cases)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=True)
