import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import ROOT, command, load_script, processes_with, run_script
from hypothesis import assume, given, settings

import common
from common import CheckFailed

study = load_script("02_scaling_study")
BASELINE = ROOT.parent / "shared/baseline"
TEXT = bytes(np.random.default_rng(0).integers(97, 105, 4000, dtype=np.uint8))
# What the source printed: N, and the losses at its seven checkpoints.
SOURCE = {
    12288: (3.43, 3.01, 2.70, 2.50, 2.36, 2.24, 2.14),
    55296: (3.14, 2.86, 2.55, 2.38, 2.20, 2.01, 1.89),
    221184: (2.92, 2.61, 2.40, 2.17, 1.85, 1.69, 1.59),
    589824: (2.82, 2.50, 2.34, 2.01, 1.68, 1.56, 1.48),
    1769472: (2.68, 2.44, 2.23, 1.87, 1.60, 1.49, 1.43),
}
SOURCE_CURVES = {
    N: [(6 * N * step * 1024, loss) for step, loss in zip(study.CHECKPOINTS, losses, strict=True)]
    for N, losses in SOURCE.items()
}
losses = st.floats(0.1, 10)
budgets = st.floats(1e3, 1e25)


# FLOPs
def test_the_ratios_to_6N():
    ratios = [study.flops_per_token(d, L) / 6 / study.non_embedding_parameters(d, L) for d, L in study.MODELS]
    assert [f"{ratio:.2f}" for ratio in ratios] == ["2.00", "1.44", "1.22", "1.14", "1.08"]
    assert [study.non_embedding_parameters(d, L) for d, L in study.MODELS] == list(SOURCE)


@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 5))
def test_counted_flops_equal_the_closed_form(width, L):
    assert study.counted_flops_per_token(4 * width, L) == study.flops_per_token(4 * width, L)


# Frontier, fit, optimum
@given(st.lists(st.tuples(budgets, losses), min_size=1, max_size=40), st.randoms())
def test_frontier(points, random):
    frontier = study.compute_frontier(points)
    assert set(frontier) <= set(points)
    assert all(a[0] <= b[0] and a[1] > b[1] for a, b in itertools.pairwise(frontier))
    assert all(any(c >= C and loss <= value for C, loss in frontier) for c, value in points)
    shuffled = random.sample(points, len(points))
    assert study.compute_frontier(shuffled) == frontier


@given(
    st.floats(-2, 2), st.floats(0.01, 100), st.lists(st.floats(1, 60), min_size=3, max_size=30, unique=True)
)
def test_slope_of_a_power_law_is_recovered(slope, a, log_budgets):
    assume(np.ptp(log_budgets) > 0.1)
    points = [(math.exp(x), a * math.exp(x * slope)) for x in log_budgets]
    fitted, intercept, (low, high) = study.fit_power_law(points)
    assert abs(fitted - slope) < 1e-6 and abs(intercept - math.log(a)) < 1e-4
    assert low - 1e-9 <= slope <= high + 1e-9 and high - low < 1e-4


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random, x = np.random.default_rng(0), np.linspace(20, 30, 8)
    inside = 0
    for _ in range(400):
        noise = random.normal(0, 0.05, len(x))
        _, _, (low, high) = study.fit_power_law(
            list(zip(np.exp(x), np.exp(3 - 0.1 * x + noise), strict=True))
        )
        inside += low <= -0.1 <= high
    assert 367 <= inside <= 393  # 380 +- 3 standard deviations


def test_student_t_is_that_of_the_tables():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 12: 2.179, 30: 2.042, 1000: 1.962}
    assert {n: round(study.student_t(n), 3) for n in table} == table


@pytest.mark.parametrize("points", [[], [(1.0, 2.0), (2.0, 1.0)], [(1.0, 2.0), (2.0, 1.0), (3.0, 0.0)]])
def test_a_slope_that_cannot_be_had_is_said(points):
    with pytest.raises(CheckFailed, match="no slope"):
        study.fit_power_law(points)


@given(
    st.lists(st.tuples(budgets, losses), min_size=1, max_size=9, unique_by=lambda p: math.log(p[0])), budgets
)
def test_interpolation_hits_its_points_and_does_not_extrapolate(curve, C):
    curve.sort()
    for c, loss in curve:
        assert study.loss_at(curve, c) == pytest.approx(loss, rel=1e-6)
    assert study.loss_at(curve, curve[0][0] * 0.999) is None
    assert study.loss_at(curve, curve[-1][0] * 1.001) is None
    if (between := study.loss_at(curve, C)) is not None:
        assert min(v for _, v in curve) - 1e-9 <= between <= max(v for _, v in curve) + 1e-9


@given(st.dictionaries(st.integers(1, 10**9), st.lists(st.tuples(budgets, losses), min_size=2, max_size=5)))
def test_the_optimum_is_the_lowest_of_the_losses_beside_it(curves):
    curves = {N: sorted(curve) for N, curve in curves.items()}
    for row in study.compute_optimal(curves):
        assert row["val_losses"][row["N"]] == min(row["val_losses"].values())
        assert 6 * row["N"] * row["D"] == pytest.approx(row["C"])
        assert row["tokens_per_param"] == pytest.approx(row["D"] / row["N"])
        assert all(study.loss_at(curves[N], row["C"]) == loss for N, loss in row["val_losses"].items())


def test_the_numbers_of_the_source_give_its_tables():
    frontier = study.compute_frontier(point for curve in SOURCE_CURVES.values() for point in curve)
    slope, _, (low, high) = study.fit_power_law(frontier)
    assert f"{slope:.3f}" == "-0.102" and low < slope < high < 0
    rows = [
        (r["N"], round(r["D"]), f"{r['tokens_per_param']:.1f}") for r in study.compute_optimal(SOURCE_CURVES)
    ]
    assert rows == [
        (12288, 135634, "11.0"), (12288, 406901, "33.1"), (12288, 1356337, "110.4"),
        (55296, 904225, "16.4"), (221184, 753520, "3.4"), (589824, 847711, "1.4"),
    ]  # fmt: skip


# Training
def tiny_run(**changes):
    run = study.Run(16, 1, 1, False, (2, 5, 8), 2, 7, "fp32", "cpu", "sha")
    return replace(run, **changes)


class Stop(Exception):
    pass


def train(run, path, stop_at=None):
    def report(step):
        if step == stop_at:
            raise Stop

    return study.train(run, path, *common.split_corpus(TEXT, study.T), report)


@pytest.mark.parametrize(
    ("precision", "halves"), [("fp32", False), ("fp32", True), ("tf32", True), ("bf16", False)]
)
@pytest.mark.parametrize("stops", [(1,), (4, 7), (3, 8)])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, stops, precision, halves):
    run = tiny_run(precision=precision, halves=halves)
    whole = train(run, tmp_path / "whole")
    longer = replace(run, checkpoints=(2, 5, 8, 9))  # so that the weights at step 8 are kept
    for path, where in (("straight", ()), ("pieces", stops)):
        for stop in (*where, 9):
            with pytest.raises(Stop):
                train(longer, tmp_path / path, stop)
    straight, pieces = (study.load_state(tmp_path / path) for path in ("straight", "pieces"))
    assert straight["step"] == pieces["step"] == 8
    assert straight["val_losses"] == pieces["val_losses"] == whole["val_losses"]
    assert len(whole["val_losses"]) == 3 and all(map(math.isfinite, whole["val_losses"]))
    for key in straight["model"]:
        assert torch.equal(straight["model"][key], pieces["model"][key])


def test_half_batches_give_the_same_bits_side_by_side_and_in_turn(tmp_path):
    data = common.split_corpus(TEXT, study.T)
    run, turns = tiny_run(d=64, L=2, halves=True), iter([False, True] * 4)
    in_turn = study.train(run, tmp_path / "in turn", *data)
    side_by_side = study.train(run, tmp_path / "side by side", *data, idle=lambda: True)
    mixed = study.train(run, tmp_path / "mixed", *data, idle=lambda: next(turns))
    whole = study.train(replace(run, halves=False), tmp_path / "whole", *data)
    assert in_turn["val_losses"] == side_by_side["val_losses"] == mixed["val_losses"]
    assert in_turn["val_losses"] == pytest.approx(whole["val_losses"], abs=1e-4)


def test_half_batches_give_the_gradient_of_the_whole(tmp_path):
    """Held against Adam's momentum: the losses cannot tell, for Adam hides a constant factor."""
    momenta = []
    for halves in (True, False):
        with pytest.raises(Stop):
            train(tiny_run(halves=halves), tmp_path / str(halves), stop_at=3)
        optimizer = study.load_state(tmp_path / str(halves))["optimizer"]["state"]
        momenta.append([state["exp_avg"] for state in optimizer.values()])
    assert len(momenta[0]) > 10
    torch.testing.assert_close(*momenta, rtol=1e-3, atol=1e-7)


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(tiny_run(), tmp_path / "state")
    assert train(tiny_run(), tmp_path / "state", stop_at=1) == first
    assert set(first) == {"step", "val_losses", "seconds", "peak"} and first["seconds"] > 0 < first["peak"]


@pytest.mark.parametrize("damage", ["cut", "empty", "flip"])
def test_a_damaged_state_is_set_aside(tmp_path, damage, capsys):
    path = tmp_path / "state.pt"
    with pytest.raises(Stop):
        train(tiny_run(), path, stop_at=4)
    whole = path.read_bytes()
    flipped = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "flip": flipped}[damage])
    assert study.load_state(path)["step"] == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "damaged" in error
    assert os.listdir(tmp_path) == ["state.damaged"]
    assert train(tiny_run(), path) == {**train(tiny_run(), path)} and path.exists()


def test_other_arguments_are_kept_apart(tmp_path):
    others = {
        "d": 20,
        "L": 2,
        "threads": 2,
        "halves": True,
        "checkpoints": (2, 5),
        "val_batches": 1,
        "seed": 8,
    }
    others |= {"precision": "bf16", "device": "cuda", "corpus": "other", "torch": "3.0"}
    assert set(others) == set(asdict(tiny_run()))
    paths = {tiny_run().path(tmp_path)} | {tiny_run(**{k: v}).path(tmp_path) for k, v in others.items()}
    assert len(paths) == len(others) + 1 and tiny_run().path(tmp_path) == tiny_run().path(tmp_path)


def test_divergence_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "LEARNING_RATE", 1e30)
    with pytest.raises(CheckFailed, match="diverged"):
        train(tiny_run(), tmp_path / "state")


@pytest.mark.parametrize(
    ("cpus", "jobs", "threads"),
    [
        (1, None, [1]), (2, None, [1, 1]), (3, None, [2, 1]), (4, None, [2, 1, 1]), (8, None, [4, 2, 1, 1]),
        (16, None, [8, 4, 2, 1, 1]), (8, 1, [8]), (8, 2, [4, 4]), (2, 5, [1] * 5),
    ],
)  # fmt: skip
def test_threads_of_models(cpus, jobs, threads):
    assert study.threads_of_models(cpus, jobs) == threads


@given(st.integers(1, 256))
def test_threads_fill_the_cores_and_no_more(cpus):
    threads = study.threads_of_models(cpus)
    assert sum(threads) == cpus and min(threads) >= 1 and len(threads) <= len(study.MODELS)


# Against the source's script and against fp32
@pytest.mark.skipif(not BASELINE.is_dir(), reason="the source's script is not here")
def test_losses_are_those_of_the_source_script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BASELINE))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import three_experiments as source

    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs, d, L, steps = source.GPT(48, 2), 48, 2, 40
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=2e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 2e-3 * step / 50
        x, y = source.batch(source.train_data, generator)
        loss = torch.nn.functional.cross_entropy(theirs(x).reshape(-1, 256), y.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    data = common.split_corpus(common.read_corpus()[0], study.T)
    run = tiny_run(d=d, L=L, checkpoints=(steps,), val_batches=study.VAL_BATCHES, seed=0)
    ours = study.train(run, tmp_path / "state", *data)["val_losses"][0]
    assert ours == pytest.approx(source.val_loss(theirs), abs=1e-4)


def losses_of(results: dict) -> np.ndarray:
    return np.array([[c["val_loss"] for c in run["checkpoints"]] for run in results["runs"]])


def test_the_recorded_run_is_whole():
    results = json.loads((ROOT / "results/02_scaling_study.json").read_text())
    text = (ROOT / "results/02_scaling_study.txt").read_text()
    assert losses_of(results).shape == (5, 7) and [run["N"] for run in results["runs"]] == list(SOURCE)
    assert abs(losses_of(results) - np.array(list(SOURCE.values()))).max() < 0.15  # another corpus
    assert f"C^{results['frontier']['slope']:.3f}" in text and results["machine"]["date"] in text
    assert (ROOT / "results/02_scaling_study.png").read_bytes().startswith(b"\x89PNG")
    shown = (ROOT / "README.md").read_text().split("```")[3].strip("\n").splitlines()
    assert len(shown) > 10 and all(line in text for line in shown)


# The script as its users run it
def quick(folder, *arguments, **environment):
    return run_script("02_scaling_study.py", "--quick", *arguments, cwd=folder, **environment)


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    return folder, quick(folder)


def test_quick_run(quick_run):
    folder, done = quick_run
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu: ") and "\r" not in done.stdout and "FLOP/s]" not in done.stdout
    assert "100%" in done.stderr and "Traceback" not in done.stderr
    for line in (
        r"corpus: [\d,]+ byte tokens",
        r"N=1,769,472: val loss",
        r"compute frontier: .*95 % interval",
        "best N",
    ):
        assert re.search(line, done.stdout)
    results = json.loads((folder / "out/02_scaling_study.json").read_text())
    assert results.keys() >= {"runs", "frontier", "optimal", "seconds", "machine", "args"}
    assert results["runs"][0].keys() >= {"N", "d", "L", "counted_flops_per_token", "checkpoints"}
    assert results["runs"][0]["checkpoints"][0].keys() == {"step", "C", "D", "val_loss"}
    assert results["frontier"].keys() >= {"slope", "ci95", "points"}
    assert results["optimal"][0].keys() >= {"C", "N", "D", "tokens_per_param"}
    assert results["moved"] < 0.01
    assert (folder / "out/02_scaling_study.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(folder)) == ["out"]


def tables(done) -> str:
    """All but the header: that has the speed of a probe in it."""
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n\n", 1)[1]


def test_the_same_command_again_gives_the_same_table(quick_run):
    folder, first = quick_run
    other = quick(folder, "--steps", "7", "--seed", "1")
    assert other.returncode == 0 and "starting afresh" in other.stderr
    again = quick(folder)  # the first run was kept
    assert "going on" in again.stderr and tables(again) == tables(first)


def test_ctrl_c_leaves_no_process_and_what_was_finished(quick_run, tmp_path):
    mark = f"mark_of_test_{os.getpid()}"
    arguments = command("02_scaling_study.py", "--quick", "--precision", "fp32", "--steps", 14)
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=os.environ | {"MARK": mark}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    while not list(tmp_path.glob("out/02_scaling_study/*.pt")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and error.endswith("interrupted\n") and "Traceback" not in error
    assert not processes_with(mark)
    resumed = run_script(*arguments[1:], cwd=tmp_path)
    assert "going on" in resumed.stderr
    whole = run_script(*arguments[1:], "--out", "other", cwd=tmp_path)
    both = [
        losses_of(json.loads((tmp_path / f / "02_scaling_study.json").read_text())) for f in ("out", "other")
    ]
    assert np.array_equal(*both) and whole.returncode == resumed.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "missing.txt"], "no such file"),
        (["--corpus", "short.txt"], "need 1,320"),
        (["--steps", "0"], "at least 1"),
        (["--jobs", "two"], "at least 1"),
        (["--precision", "fp64"], "fp64"),
        (["--out", "short.txt"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "short.txt").write_bytes(b"too short")
    done = run_script("02_scaling_study.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and message in done.stderr
    assert os.listdir(tmp_path) == ["short.txt"]


def test_a_closed_pipe_is_no_error(quick_run):
    folder, _ = quick_run
    script = " ".join(command("02_scaling_study.py", "--quick"))
    done = subprocess.run(
        ["bash", "-c", f"{script} | head -1; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("cpu: ") and "Error" not in done.stderr


def test_a_script_without_a_file_is_told_to_get_one(tmp_path):
    code = (ROOT / "02_scaling_study.py").read_text()
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "save it as a .py file" in done.stderr.splitlines()[-1]
