import argparse
import itertools
import json
import math

import hypothesis.strategies as st
import pytest
import torch
from conftest import ROOT, load_script, run_script
from hypothesis import assume, example, given, settings

import common

NAME = "07_zero_memory"
script = load_script(NAME)
few = settings(max_examples=4)


# The arithmetic
def test_the_line_of_the_paper():
    totals = [sum(script.bytes_per_gpu(7.5e9, 64, stage).values()) / 1e9 for stage in script.STAGES]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.88], rel=5e-3)
    assert [120 / total for total in totals[1:3]] == pytest.approx([3.8, 7.2], rel=0.01)
    assert sum(s for s, _ in script.TERMS.values()) == 16


def test_70B_on_64_GPUs():
    rows = script.stage_table(70e9, 64, "H100").records()
    assert [row["in all"] for row in rows] == pytest.approx([1120, 280 + 13.125, 140 + 15.3125, 17.5])
    assert [row["fits"] for row in rows] == ["no", "no", "no", "yes"]
    assert [row["fewest GPUs"] for row in rows] == [None, None, None, 14]
    assert rows[3]["sent, N"] == pytest.approx(3 * 63 / 64)


sizes = st.floats(1e6, 1e13)


@given(sizes, st.integers(1, 5000))
def test_more_ranks_and_more_stages_hold_less(N, n):
    totals = [
        [sum(script.bytes_per_gpu(N, k, stage).values()) for stage in script.STAGES] for k in (n, n + 1)
    ]
    for now, then in zip(*totals, strict=True):
        assert then <= now * (1 + 1e-12)
    for total in totals:
        assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(total))
    per_parameter = [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
    assert totals[0] == pytest.approx([x * N for x in per_parameter])
    assert all(script.traffic(n, stage) <= script.traffic(n + 1, stage) < 3 for stage in script.STAGES)


@given(sizes, st.sampled_from(script.STAGES), st.sampled_from((80e9, 141e9)))
def test_the_fewest_gpus_are_just_enough(N, stage, memory):
    n = script.fewest_gpus(N, stage, memory)
    if n is None:
        assert sum(script.bytes_per_gpu(N, 10**9, stage).values()) > memory * (1 - 1e-6)
    else:
        assert sum(script.bytes_per_gpu(N, n, stage).values()) <= memory * (1 + 1e-12)
        assert n == 1 or sum(script.bytes_per_gpu(N, n - 1, stage).values()) > memory * (1 - 1e-12)


@pytest.mark.parametrize(("text", "N"), [("70e9", 70e9), ("70B", 70e9), ("1.5b", 1.5e9), ("gpt-3", 175e9)])
def test_sizes(text, N):
    assert script.model_size(text) == N


@pytest.mark.parametrize("text", ["0", "-7B", "nan", "inf", "B", "", "seventy", "1e30"])
def test_no_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError):
        script.model_size(text)


@pytest.mark.parametrize("bad", [("--gpus", "0"), ("--params", "big", "--gpus", "2")])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, bad):
    done = run_script(f"{NAME}.py", *bad, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_only_the_arithmetic(tmp_path):
    done = run_script(f"{NAME}.py", "--params", "70B", "--gpus", "64", "--gpu", "h100", cwd=tmp_path)
    assert done.returncode == 0 and "70B parameters" in done.stdout and "by hand" not in done.stdout
    assert (tmp_path / f"out/{NAME}.png").stat().st_size > 10_000


# Shards
@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 8)
)
def test_shards_are_a_partition(shapes, world):
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    before = [p.detach().clone() for p in parameters]
    units = [
        script.Unit([torch.nn.Parameter(p.clone()) for p in before], rank, world) for rank in range(world)
    ]
    length, numel = units[0].length, sum(p.numel() for p in before)
    assert length % world == 0 and numel <= length < numel + world
    covered = [i for unit in units for i in range(length)[unit.here]]
    assert covered == list(range(length))
    gathered = torch.cat([unit.full[unit.here] for unit in units])
    for part, right in zip(units[0].split(gathered), before, strict=True):
        assert torch.equal(part.view_as(right), right)
    assert not gathered[numel:].any()
    units[0].full += 1
    assert all(torch.equal(p, b + 1) for p, b in zip(units[0].parameters, before, strict=True))


@pytest.mark.parametrize(("numel", "world", "length"), [(19, 8, 24), (3, 4, 4), (57, 2, 58), (8, 4, 8)])
def test_padding(numel, world, length):
    assert script.Unit([torch.nn.Parameter(torch.ones(numel))], world - 1, world).length == length


@few
@given(st.integers(1, 4), st.sampled_from((4, 12, 20)), st.integers(1, 2), st.integers(0, 99))
def test_each_stage_is_the_single_process_and_holds_the_formula(ranks, world, d, L, seed):
    for stage in script.STAGES:
        for errors, rest, sent, N, padding in ranks(world, NAME, "sharded", stage, d, L, 3, seed):
            assert all(error < script.LOSS_BOUND for error in errors[:2]), (stage, errors)
            # Weights: Adam makes a whole step of a gradient that is all rounding. Half of one is allowed.
            assert errors[2] < script.LEARNING_RATE / 2
            s = 4 * N  # bytes of a float32 copy; master weights and moments are three
            weights, gradients = s // (world if stage == 3 else 1), s // (world if stage >= 2 else 1)
            optimiser = 3 * s // (world if stage >= 1 else 1)
            assert rest == {"weights": weights, "gradients": gradients, "Adam, master": optimiser}
            assert all(0 <= more < world for more in padding)
            if stage < 3:
                assert sum(sent.values()) == pytest.approx(2 * s * (world - 1) / world)
            else:
                blocks = N - (common.V * 2 * d + script.T * d + 2 * d) - padding[0]
                once = N - blocks  # embeddings and head are gathered once
                expected = s + 4 * once + 8 * blocks
                assert sum(sent.values()) == pytest.approx(expected * (world - 1) / world)


@pytest.mark.parametrize("stage", script.STAGES)
def test_gradients_of_several_passes_add_up(ranks, stage):
    for twice, once in ranks(2, NAME, "accumulated_by_zero", stage):
        assert twice == pytest.approx(2 * once, rel=1e-6) and once > 0


def test_an_evaluation_between_backward_and_step_changes_nothing(ranks):
    for plain, evaluated, rest, rest_after in ranks(3, NAME, "evaluated_by_zero"):
        assert plain == evaluated and rest == rest_after


def test_norms_3_and_4_make_5(ranks):
    assert ranks(2, NAME, "norm_of_shards", [3.0, 4.0]) == [5, 5]
    assert ranks(4, NAME, "norm_of_shards", [1.0, -1.0, 1.0, 1.0]) == [2, 2, 2, 2]


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("way", ["ZeroRedundancyOptimizer", "fully_shard", "fully_shard, weights kept"])
def test_the_library_gives_the_same(ranks, way, world):
    N = sum(p.numel() for p in common.GPT(20, 1, T=script.T).parameters())
    for errors, gradient, rest in ranks(world, NAME, "through_the_library", way, 20, 0):
        assert max(*errors, gradient) < script.LOSS_BOUND
        whole = 4 * N if way.startswith("Zero") else 4 * N / world
        assert whole <= rest[0] < 1.1 * whole and 8 * N / world <= rest[2] < 1.5 * 8 * N / world


def test_a_sum_in_place_of_an_average_is_seen(ranks):
    assert ranks(3, NAME, "averaging") == [[True, False]] * 3


# Activations
def test_activations_by_hand():
    s, b, d, h, t = 8, 2, 16, 4, 2
    sbd, scores = s * b * d, 5 * h * s / d
    assert script.activation_bytes(s, b, d, h) == sbd * (34 + scores) == 256 * 44
    assert script.activation_bytes(s, b, d, h, "attention") == sbd * 34
    assert (
        script.activation_bytes(s, b, d, h, "all") == script.activation_bytes(s, b, d, h, "all", t) == sbd * 2
    )
    assert script.activation_bytes(s, b, d, h, "nothing", t) == sbd * (10 + 24 / t + scores / t)
    assert script.activation_bytes(s, b, d, h, "nothing", t, True) == sbd * (34 + scores) / t
    assert script.activation_bytes(s, b, d, h, "attention", t) == sbd * (10 + 24 / t)
    assert script.activation_bytes(s, b, d, h, "all", t, True) == sbd * 2 / t


@few
@given(st.integers(2, 40), st.integers(1, 4), st.sampled_from((8, 16, 40)), st.sampled_from((1, 2, 4)))
@example(3, 1, 40, 2)
def test_a_layer_saves_what_the_formula_says(s, b, d, h):
    table = script.layer_table(s, b, d, h, 0)  # raises if a byte is missing
    assert table.rows[0][4] == pytest.approx(34 + 5 * h * s / d)


@few
@given(st.integers(8, 40), st.integers(2, 3), st.sampled_from((8, 16)), st.integers(1, 5))
def test_checkpoints_save_as_predicted_and_change_no_gradient(s, b, d, L):
    assume(s * b > 8)
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for row in script.checkpoint_table(s, b, d, L, data, 0).records():  # raises if a gradient differs
        assert row["ratio"] == pytest.approx(1, abs=0.02)
        assert row["FLOPs"] == pytest.approx(row["FLOPs, predicted"], rel=1e-9)
        assert row["saved, MB"] == row["saved, MB, predicted"] > 0


def test_the_bill_of_70B():
    rows = script.bill_table().records()
    assert [row["GB"] for row in rows] == pytest.approx([1900.5, 182.5, 10.7], rel=1e-2)
    assert rows[1]["and sequence"] == pytest.approx(182.5 / 8, rel=1e-2)


# The script
def test_quick_run_on_three_ranks(tmp_path):
    done = run_script(f"{NAME}.py", "--quick", "--ranks", "3", "--out", str(tmp_path), cwd="/")
    assert done.returncode == 0, done.stderr
    for words in (
        "7.5B parameters",
        "ZeRO by hand",
        "through the library",
        "activations",
        "checkpoints",
        "70B",
    ):
        assert words in done.stdout
    results = json.loads((tmp_path / f"{NAME}.json").read_text())
    assert results["world"] == 3 and math.isfinite(results["args"]["seed"])
    assert (tmp_path / f"{NAME}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_recorded_run_shows_what_the_claims_say():
    results = json.loads((ROOT / f"results/{NAME}.json").read_text())
    by_hand = next(results[key] for key in results if key.startswith("ZeRO by hand") and "notes" not in key)
    for row, traffic in zip(by_hand, (1.5, 1.5, 1.5, 2.25), strict=True):
        assert sum(row[name] for name in ("weights", "gradients", "Adam, master")) == pytest.approx(
            sum(script.bytes_per_gpu(1, 4, row["stage"]).values())
        )
        assert row["sent, N"] == pytest.approx(row["due"])
        assert row["sent, N"] <= traffic == row["paper"] and row["ratio"] == 1
    same = next(
        results[key] for key in results if key.startswith("the same in float32") and "notes" not in key
    )
    assert all(row["losses apart by"] < 1e-5 for row in same)
