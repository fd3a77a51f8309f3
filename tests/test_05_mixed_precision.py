import contextlib
import json
import math
import statistics
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from conftest import ROOT, load_script, run_script
from hypothesis import assume, given, settings

import common

script = load_script("05_mixed_precision")
CPU = torch.device("cpu")
real = [f for f in script.FORMATS if f.dtype]


@pytest.fixture(scope="module")
def data():
    return common.split_corpus(common.read_corpus()[0], script.T)


class Bar:
    def update(self):
        pass


# Formats
@pytest.mark.parametrize("f", real, ids=lambda f: f.name)
def test_limits_are_those_of_finfo(f):
    info = torch.finfo(f.dtype)
    assert (f.max, f.least_normal, f.eps) == (info.max, info.smallest_normal, info.eps)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[f.dtype.itemsize]
    assert f.least == torch.tensor(1).to(integers).view(f.dtype).double()
    script.check_format(f)


def test_limits_as_published():
    named = {f.name: f for f in script.FORMATS}
    assert (named["fp16"].max, named["fp16"].least_normal, named["fp16"].least) == (65504, 2**-14, 2**-24)
    assert (named["fp8 e4m3"].max, named["fp8 e5m2"].max) == (448, 57344)
    assert named["bf16"].max == pytest.approx(3.39e38, rel=1e-3) and named["bf16"].eps == 2**-7
    assert named["tf32"].eps == named["fp16"].eps and named["tf32"].least_normal == named["fp32"].least_normal
    assert torch.tensor(1e38, dtype=torch.bfloat16) * 10 == math.inf  # where fp32 does, too


@pytest.mark.parametrize("f", [f for f in real if f.dtype.itemsize < 4], ids=lambda f: f.name)
def test_every_code_means_what_it_means_to_torch(f):
    codes = torch.arange(2 ** (8 * f.dtype.itemsize))
    values = codes.to({1: torch.uint8, 2: torch.int16}[f.dtype.itemsize]).view(f.dtype).double()
    ours = f.decode(codes)
    assert torch.equal(ours.isnan(), values.isnan())
    assert torch.equal(ours[~ours.isnan()], values[~values.isnan()])


@settings(max_examples=200)
@given(st.sampled_from(real), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_is_torchs(f, x):
    assume(abs(x) <= f.max)
    x = torch.tensor(x)
    assert torch.equal(f.round(x), x.to(f.dtype).double())


@given(st.sampled_from(script.FORMATS), st.floats(1e-30, 1e30))
def test_bits_are_decoded_to_the_rounded_number(f, x):
    assume(f.least <= x <= f.max)
    bits = f.encode(x)
    assert [len(part) for part in bits.split()] == [1, f.e, f.m]
    code = torch.tensor(int(bits.replace(" ", ""), 2))
    assert f.decode(code) == f.round(torch.tensor(x))


@pytest.mark.parametrize("f", script.FORMATS, ids=lambda f: f.name)
def test_numbers_too_large_and_too_small(f):
    x = torch.tensor([1e308, -1e308, 1e-320, -1e-320, 0.0], dtype=torch.float64)
    assert f.round(x).tolist() == [math.inf, -math.inf, 0, 0, 0]
    assert set(f.encode(1e-320)) == set(f.encode(0.0)) == {"0", " "}
    assert f.encode(f.least / 2) == f.encode(0.0) and f.encode(f.least * 0.75).endswith("1")
    for bad in (1e308, -1.0, math.nan):
        with pytest.raises(ValueError):
            f.encode(bad)


def test_beyond_the_largest_number():
    f = script.BY_NAME["fp16"]
    assert f.round(torch.tensor([65519.0, 65520.0, -1e9])).tolist() == [65504, math.inf, -math.inf]
    assert torch.tensor(65519.0).half() == 65504 and torch.tensor(65520.0).half() == math.inf


# What goes wrong
numbers = st.floats(2.0**-60, 2.0**10)


@given(st.lists(numbers, min_size=1, max_size=40), st.sampled_from(script.FORMATS[2:]))
def test_shares_are_monotone_in_the_scale(gradient, f):
    g = torch.tensor(gradient, dtype=torch.float64)
    found = [script.shares(g, 2.0**k, f) for k in range(0, 31, 3)]
    zero, _, over = zip(*found, strict=True)
    assert list(zero) == sorted(zero, reverse=True) and list(over) == sorted(over)
    for i, k in enumerate(range(0, 31, 3)):
        scaled = g * 2.0**k
        assert zero[i] == (scaled <= f.least / 2).double().mean()
        assert all(0 <= share <= 1 for share in found[i]) and sum(found[i]) <= 1 + 1e-12


def test_shares_by_hand_and_zeros_do_not_count():
    g = torch.tensor([0.0, 0.0, 2**-26, 2**-20, 1.0, 65536.0])
    assert script.shares(g, 1.0, script.BY_NAME["fp16"]) == (0.25, 0.25, 0.25)
    assert script.shares(g, 2.0, script.BY_NAME["fp16"]) == (0.25, 0.25, 0.25)  # 2^-25 rounds to the even 0
    assert script.shares(g, 4.0, script.BY_NAME["fp16"]) == (0, 0.5, 0.25)
    assert script.shares(g, 1.0, script.BY_NAME["bf16"]) == (0, 0, 0)
    assert script.shares(torch.tensor([2**-14, 2**-15]), 1.0, script.BY_NAME["fp16"]) == (0, 0.5, 0)


def test_gradients_are_those_of_the_model(data):
    model, _, generator = script.new_model(0, CPU)
    x, y = common.batch(data[0], 2, 16, generator)
    found = script.gradients(model, x, y)
    weights = torch.autograd.grad(model.loss(x, y), list(model.parameters()))
    assert torch.equal(found["weights"], torch.cat([g.flatten() for g in weights]))
    d, tokens = script.WIDTH, 2 * 16
    assert len(found["outputs"]) == tokens * (3 * d + d + 4 * d + d + common.V)
    assert not any(module._backward_hooks for module in model.modules())


def test_accidents():
    rows = script.accidents(torch.tensor([1.0, 1.0]), torch.tensor([2.0**-9, 2.0**-7])).records()
    table = {row[""]: row for row in rows}
    assert table["0.001 added up 10,000 times"]["fp16"] == 4
    assert table["0.001 added up 10,000 times"]["bf16"] == 0.5
    assert table["0.001 added up 10,000 times"]["float64"] == pytest.approx(10)
    assert table["1 + 2^-9: a weight and its update"]["bf16"] == 1
    share = table["share of weights that a step of AdamW leaves as they were"]
    assert (share["fp32"], share["fp16"], share["bf16"]) == (0, 0, 0.5)
    assert table["softmax(12, 11), e^x unshifted"]["fp16"] is None


# Loss scaling
@settings(max_examples=60)
@given(
    st.lists(st.sampled_from((0.5, -3.0, math.inf, -math.inf, math.nan)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from((1.5, 2.0, 4.0)),
    st.sampled_from((0.25, 0.5)),
    st.sampled_from((2.0**16, 1.0, 3.0)),
)
def test_the_scaler_is_the_librarys_step_for_step(gradients, interval, growth, backoff, scale):
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    steppers = [torch.optim.SGD([p], lr=0.1) for p in (ours, theirs)]
    scaler = script.LossScaler(scale, growth, backoff, interval)
    library = torch.amp.GradScaler("cpu", scale, growth, backoff, interval)
    for g in gradients:
        scale = scaler.scale
        assert library.scale(torch.ones(())).item() == scale
        for p in (ours, theirs):
            p.grad = torch.tensor([g, 1.0, 2.0]) * scale
        scaler.unscale([ours])
        scaler.step(steppers[0])
        scaler.update()
        library.unscale_(steppers[1])
        library.step(steppers[1])
        library.update()
        assert scaler.scale == pytest.approx(library.get_scale(), rel=1e-6)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert ours.isfinite().all()
        scaler.scale = library.get_scale()  # ours is in 64 bit, theirs in 32: rounding must not add up


def test_the_scale_stays_a_number_of_fp32_and_fp16_gradients_are_refused():
    p, q = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    scaler, optimiser = script.LossScaler(2.0**120, interval=1), torch.optim.SGD([p], lr=0.1)
    library = torch.amp.GradScaler("cpu", 2.0**120, growth_interval=1)
    library.scale(torch.ones(()))
    for _ in range(12):
        p.grad, q.grad = torch.ones(1), torch.ones(1)
        scaler.unscale([q])
        scaler.update()
        library.step(optimiser)
        library.update()
        assert scaler.scale == library.get_scale()
    half = torch.nn.Parameter(torch.ones(1).half())
    half.grad = torch.ones(1).half()
    with pytest.raises(ValueError):
        scaler.unscale([half])


def test_planted_overflows_and_the_mistakes_of_the_source(data):
    table = script.compare_scalers(12, (2, 3), data[0], 0, CPU)
    assert [row[:3] for row in table.rows] == [(2, 16, 15), (3, 15, 14), (11, 14, 15)]
    lines = script.scaler_mistakes(14, data[0], 0, CPU).splitlines()
    assert "takes 14 of 14" in lines[0] and "takes 0," in lines[1]
    assert int(lines[2].split()[-1].rstrip(".")) >= 3
    assert float(lines[3].split()[-1].rstrip(".")) == pytest.approx(2**-16, rel=0.02)


# Training
def recipe(name):
    return next(r for r in script.RECIPES if r.name == name)


def test_fp32_is_plain_training(data):
    result, model, _ = script.train(recipe("fp32"), 3, 8, *data, CPU, Bar())
    other, optimiser, generator = script.new_model(3, CPU)
    for step in range(8):
        x, y = common.batch(data[0], script.B, script.T, generator)
        optimiser.param_groups[0]["lr"] = script.LEARNING_RATE * (step + 1) / script.WARM_UP
        optimiser.zero_grad()
        loss = other.loss(x, y)
        loss.backward()
        optimiser.step()
        assert result["losses"][step] == pytest.approx(loss.item(), abs=1e-6)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_divided_loss_changes_nothing_in_fp32(data):
    divided = replace(recipe("fp32"), divisor=script.MICRO_BATCHES)
    losses = [script.train(r, 0, 6, *data, CPU, Bar())[0]["losses"] for r in (recipe("fp32"), divided)]
    assert losses[0] == losses[1]  # to the bit: it is a power of two


def test_weights_are_the_rounded_master_weights(data):
    result, model, optimiser = script.train(recipe("bf16 weights, fp32 master"), 0, 5, *data, CPU, Bar())
    master = optimiser.param_groups[0]["params"]
    for p, w in zip(model.parameters(), master, strict=True):
        assert (p.dtype, w.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(p, w.bfloat16()) and not torch.equal(p.float(), w)
    assert result["bytes"] == [2, 4, 4, 8]


@pytest.mark.parametrize("r", script.RECIPES, ids=lambda r: r.name)
def test_bytes_are_those_of_the_recipe(r, data):
    if not (why := script.unavailable(r, CPU)):
        result, *_ = script.train(r, 0, 2, *data, CPU, Bar())
        assert tuple(result["bytes"]) == r.bytes()
        assert result["failed"] == (2 if r.name == "fp16 weights" else None)
    else:
        assert r.name == "tf32" and "fp32 here" in why


def test_an_autocast_that_is_off_is_seen(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *a, **k: contextlib.nullcontext())
    assert script.unavailable(recipe("fp16 autocast"), CPU) == "under autocast a matmul gives torch.float32"
    assert not script.unavailable(recipe("bf16 weights"), CPU)


def test_a_divided_loss_needs_scaling(data):
    names = "fp16 autocast", "fp16 autocast, loss / 4,096", "fp16 autocast, loss / 4,096, scaling"
    plain, divided, scaled = (script.train(recipe(n), 0, 12, *data, CPU, Bar())[0]["losses"] for n in names)
    assert abs(scaled[-1] - plain[-1]) < 0.01 < divided[-1] - plain[-1]


def test_why_weights_in_fp16_fail():
    model, _, generator = script.new_model(0, CPU)
    model.half()
    x = torch.randint(0, common.V, (script.B, script.T), generator=generator)
    model.loss(x, x).backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.optim.AdamW(model.parameters(), lr=1e-4).step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    infinite = after.isinf()
    assert infinite.float().mean() > 0.5 and (before[infinite] != 0).all()
    squares = (before.float() ** 2 * 0.001).half()  # what AdamW keeps of them, (1 - beta_2) g^2
    assert (squares[infinite] == 0).all()


def test_the_step_at_which_a_run_leaves():
    base = [1.0] * 40
    assert script.leaves(base, base, 0.1) is None
    assert script.leaves([1.0] * 20 + [1.15] * 20, base, 0.1) == 31  # 11 of 15 are 0.15 above
    assert script.leaves([1.0, 2.0], base, 0.4) == 2


def test_the_yardstick_is_the_spread_of_seeds():
    run = {"losses": [3.0] * 30, "val": 2.0, "failed": None, "left": None, "seconds": 1.0}
    off, broken = run | {"val": 2.5, "left": 9, "seconds": 2.0}, run | {"failed": 7, "left": 7, "val": None}
    table = script.recipe_table({"fp32": run, "x": off, "y": broken}, [2.0, 2.1, 2.3], {"z": "why"}, 30)
    assert table.rows[1][3:] == (0.5, pytest.approx(0.5 / statistics.stdev([2.0, 2.1, 2.3])), 9, None, 2.0)
    assert table.rows[2][1:] == (None, None, None, None, 7, 7, None) and "z skipped: why" in table.notes


# fp8
@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(-30, 30))
def test_a_scaled_matmul_does_not_care_for_powers_of_two(m, k, n, power):
    torch.manual_seed(m * k + n)
    a, b, f = torch.randn(m, k), torch.randn(k, n), script.BY_NAME["fp8 e4m3"]
    plain = script.scaled_matmul(a, b, f)
    moved = script.scaled_matmul(a * 2.0**power, b, f) / 2.0**power
    torch.testing.assert_close(plain, moved, rtol=1e-5, atol=1e-5)
    bound = (a.abs() @ b.abs()).double() * (
        f.eps * 1.2
    ) + 0.1  # each input is off by eps / 2 of itself, or least
    assert ((plain - (a @ b)).abs() <= bound).all()
    assert not script.scaled_matmul(torch.zeros(m, k), b, f).any()


def test_fp8_errors_are_as_predicted():
    table = script.fp8_table(64, CPU)
    assert all(row["ratio"] == pytest.approx(1, abs=0.1) for row in table.records())
    assert "ours" in table.notes or "not here" in table.notes


# The script
def test_quick_run(tmp_path):
    done = run_script("05_mixed_precision.py", "--quick", "--out", str(tmp_path), cwd="/")
    assert done.returncode == 0, done.stderr
    for words in (
        "formats, from their bits",
        "torch.amp.GradScaler",
        "in spreads",
        "bytes a parameter",
        "scaled",
    ):
        assert words in done.stdout
    results = json.loads((tmp_path / "05_mixed_precision.json").read_text())
    assert results["runs"]["fp16 weights"]["failed"] == 2
    assert (tmp_path / "05_mixed_precision.png").read_bytes()[:4] == b"\x89PNG"


def test_the_recorded_run_shows_what_the_claims_say():
    results = json.loads((ROOT / "results/05_mixed_precision.json").read_text())
    title = next(key for key in results if key.startswith("GPT of") and "notes" not in key)
    runs = {row[""]: row for row in results[title]}
    for name in ("bf16 autocast", "bf16 weights, fp32 master", "fp16 autocast, scaling"):
        assert abs(runs[name]["in spreads"]) < 0.1 and runs[name]["leaves at"] is None
    assert runs["bf16 weights"]["in spreads"] > 3
    assert runs["fp16 autocast, loss / 4,096"]["in spreads"] > 30
    assert 1 < runs["fp16 autocast, loss / 4,096"]["leaves at"] < runs["bf16 weights"]["leaves at"] < 300
    assert abs(runs["fp16 autocast, loss / 4,096, scaling"]["in spreads"]) < 0.1
    assert runs["fp16 weights"]["not finite at"] == 2
