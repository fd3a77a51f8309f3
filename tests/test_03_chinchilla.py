import itertools
import json
import math
import os
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import ROOT, command, load_script, processes_with, run_script
from hypothesis import example, given, settings

import common

NAME = "03_chinchilla"
script = load_script(NAME)
from script_03_chinchilla import Law  # noqa: E402

POINTS = ROOT.parent / "shared/data/chinchilla_points.csv"
laws = st.builds(
    Law,
    st.floats(0.5, 3),
    st.floats(50, 5000),
    st.floats(50, 5000),
    st.floats(0.15, 0.6),
    st.floats(0.15, 0.6),
)
sizes, budgets = st.floats(1e6, 1e13), st.floats(1e15, 1e26)


# 6ND
@given(sizes, sizes)
def test_any_two_give_the_third(N, D):
    C = 6 * N * D
    for given_two in ({"N": N, "D": D}, {"N": N, "C": C}, {"D": D, "C": C}):
        assert script.solve(**given_two) == pytest.approx((N, D, C))


@given(st.integers(1, 30), st.integers(1, 5))
def test_counted_flops_are_the_sum_over_matmuls(width, L):
    d = 4 * width
    model, tokens = script.GPT(d, L, T=script.T), torch.zeros(1, script.T, dtype=torch.long)
    with script.FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    assert counter.get_total_flops() == script.T * script.flops_per_token(d, L)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert matrices == script.total_parameters(d, L)
    assert sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2) == script.non_embedding(d, L)


def test_the_claims_about_compute():
    told = script.corrections()
    for words in (
        "1.6e+10 GPU-seconds, 4.4M H100-hours", "11 days on 16,000", "499 years, 202 at peak",
        "3,710 at peak", "218 A100-days at peak, 545", "3.14e+23, 5.88e+23", "Gopher: 5.04e+23",
        "1,875 a parameter: not 10 but 94 times 20", "1.3e+26",
    ):  # fmt: skip
        assert words in told
    shares = {name: script.mfu(m[0], m[1], m[3], m[4]) for name, m in script.MODELS.items() if m[4]}
    assert shares["LLaMA-65B"] == pytest.approx(0.478, abs=1e-3)
    assert shares["Llama 2 70B"] == pytest.approx(0.428, abs=1e-3)
    assert shares["Llama 3.1 405B"] == pytest.approx(0.346, abs=1e-3)


# Laws
@given(laws, sizes, sizes, st.floats(1.01, 100))
def test_more_of_either_is_less_loss(law, N, D, factor):
    assert law.loss(N, D) >= law.loss(N * factor, D) >= law.E
    assert law.loss(N, D) >= law.loss(N, D * factor) >= law.E


@given(laws, budgets)
def test_the_optimum_is_where_a_search_finds_it(law, C):
    N, D = law.optimum(C)
    assert pytest.approx(C) == 6 * N * D
    around = N * np.geomspace(0.5, 2, 20001)
    excess = law.loss(around, C / (6 * around)) - law.E
    assert excess.min() >= (law.loss(N, D) - law.E) * (1 - 1e-9)
    assert around[excess.argmin()] == pytest.approx(N, rel=1e-2)
    twice_N, twice_D = law.optimum(2 * C)
    assert twice_N / N == pytest.approx(2**law.a) and twice_D / D == pytest.approx(2 ** (1 - law.a))
    assert law.budget(N) == pytest.approx(C)


def test_published_optima():
    best = {name: law.optimum(5.76e23) for name, law in script.LAWS.items()}
    expected = {script.PRINTED: (32.2e9, 92.7), script.DIGITS: (40.4e9, 58.9), script.REFIT: (72.3e9, 18.4)}
    for name, (N, ratio) in expected.items():
        assert best[name][0] == pytest.approx(N, rel=2e-3)
        assert best[name][1] / best[name][0] == pytest.approx(ratio, rel=2e-3)


def test_the_source_mixes_two_laws_up():
    law = script.LAWS[script.PRINTED]
    for (N, D), (printed, right) in {
        (175e9, 300e9): (0.312, 2.002), (70e9, 1.4e12): (0.247, 1.937), (8e9, 15e12): (0.259, 1.949)
    }.items():  # fmt: skip
        assert (law.loss(N, D) - law.E, law.loss(N, D)) == pytest.approx((printed, right), abs=6e-4)
    assert script.kaplan_N(1e8) == pytest.approx(2.830, abs=1e-3)
    assert script.kaplan_N(1e9) == pytest.approx(2.376, abs=1e-3)
    assert script.kaplan_N(2e9) / script.kaplan_N(1e9) == pytest.approx(1 - 0.051, abs=1e-3)
    assert script.kaplan_C(3.1e8 * script.PF_DAY) == script.kaplan_D(5.4e13) == 1
    assert script.kaplan(1e40, 1e9) == pytest.approx((1.8e13 / 1e9) ** 0.103)


def test_one_law_shows_both_exponents():
    for name, without, with_them in ((script.REFIT, 0.78, 0.51), (script.DIGITS, 0.74, 0.46)):
        law = script.LAWS[name]
        assert round(script.apparent_exponent(law, False), 2) == without
        assert round(script.apparent_exponent(law, True), 2) == with_them


# The fit
def grid_of_runs(law, count=6):
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e10, count), np.geomspace(1e9, 1e12, count)))
    return N, D, law.loss(N, D)


some_starts = script.STARTS[::7]  # 7 has no factor in common with the sides of the grid: all values are in


@pytest.fixture
def few_starts(monkeypatch):
    monkeypatch.setattr(script, "STARTS", some_starts)


exponents = st.floats(0.25, 0.45)
scales = st.floats(100, 3000)


@settings(max_examples=8)
@given(st.builds(Law, st.floats(1, 2.5), scales, scales, exponents, exponents))
@example(Law(2.5, 100, 100, 0.25, 0.375))  # D's term is a fiftieth of N's
def test_noise_free_runs_give_their_constants_back(law):
    weights = torch.ones(1, 36, dtype=torch.float64)
    theta, objective, gradient = script.fit(*grid_of_runs(law), some_starts, weights)
    best = torch.where(gradient < 1e-8, objective, math.inf).argmin()
    assert list(asdict(script.law_of(theta[best])).values()) == pytest.approx(
        list(asdict(law).values()), rel=1e-4
    )


def noisy_runs(seed=0):
    N, D, L = grid_of_runs(script.LAWS[script.REFIT])
    return N, D, L * np.exp(np.random.default_rng(seed).normal(0, 0.005, len(L)))


def test_the_bootstrap_is_deterministic_and_order_and_units_do_not_matter(few_starts):
    N, D, L = noisy_runs()
    found = script.refit(N, D, L, 30, seed=1)
    assert found == script.refit(N, D, L, 30, seed=1) != script.refit(N, D, L, 30, seed=2)
    assert found["refit"]["gradient"] < 1e-8 and found["refit"]["replicates"] == 30
    order = np.random.default_rng(0).permutation(len(L))
    again = script.refit(N[order], D[order], L[order], 30, seed=1)["refit"]
    in_millions = script.refit(N / 1e6, D / 1e6, L, 30, seed=1)["refit"]
    for name in ("E", "A", "B", "alpha", "beta"):
        assert again[name] == pytest.approx(found["refit"][name], rel=1e-5)
    for name in ("E", "alpha", "beta", "objective"):
        assert in_millions[name] == pytest.approx(found["refit"][name], rel=1e-5)
    assert in_millions["A"] == pytest.approx(found["refit"]["A"] * 1e6 ** -found["refit"]["alpha"], rel=1e-4)


def test_the_gradient_and_the_objective_are_those_of_autograd():
    N, D, L = noisy_runs()
    theta, objective, _ = script.fit(N, D, L, script.STARTS[7:8], torch.ones(1, 36, dtype=torch.float64))
    logs = [torch.tensor(np.log(x)) for x in (N, D, L)]
    t = theta[0].clone().requires_grad_()
    terms = torch.stack([t[0] - t[3] * logs[0], t[1] - t[4] * logs[1], t[2].expand(36)])
    loss = torch.nn.functional.huber_loss(terms.logsumexp(0), logs[2], reduction="sum", delta=script.HUBER)
    loss.backward()
    assert loss.item() == pytest.approx(objective.item()) and t.grad[:3].abs().max() < 1e-7


GRID = np.geomspace(1e7, 1e9, 9)
OTHER = np.geomspace(1e9, 1e11, 9)[[3, 1, 4, 8, 5, 2, 6, 0, 7]]


@pytest.mark.parametrize(
    ("N", "D", "L", "message"),
    [
        (GRID[:5], OTHER[:5], GRID[:5], "5 runs of different N or D"),
        (
            np.repeat(GRID[:2], 6),
            np.repeat(OTHER[:2], 6),
            np.linspace(2, 3, 12),
            "2 runs of different N or D",
        ),
        (np.full(9, 1e9), OTHER, np.linspace(2, 3, 9), "N is the same"),
        (GRID, np.full(9, 1e9), np.linspace(2, 3, 9), "D is the same"),
        (GRID, GRID * np.linspace(20, 21, 9), np.linspace(2, 3, 9), "D / N is the same"),
        (
            GRID,
            OTHER,
            2 + 0.1 * np.log(GRID / 1e7) + 0.1 * np.log(OTHER / 1e9),
            "must fall|have a law",
        ),
    ],
)
def test_runs_that_cannot_identify_the_law_are_refused(N, D, L, message, few_starts):
    with pytest.raises(common.BadInput, match=message):
        script.refit(N, D, L, 50, 0)


def test_noise_free_points_go_through_the_script(tmp_path):
    N, D, L = grid_of_runs(script.LAWS[script.REFIT])
    rows = [f"{n!r},{d!r},{loss!r}" for n, d, loss in zip(N.tolist(), D.tolist(), L.tolist(), strict=True)]
    (tmp_path / "points.csv").write_text("\n".join(["N,D,loss", *rows]))
    done = run_script(f"{NAME}.py", "--points", "points.csv", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / f"out/{NAME}.json").read_text())["refit"]
    for name, value in asdict(script.LAWS[script.REFIT]).items():
        assert found[name] == pytest.approx(value, rel=1e-4)


def test_points_as_people_have_them(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text('\ufeff"N", "D" ,color,"loss"\n1e9,2e10,#faebdd,2.5\n7e9,1.4e11,"#f8d1b8",2.2\n')
    N, D, L = script.read_points(path, None)
    assert [sorted(x) for x in (N, D, L)] == [[1e9, 7e9], [2e10, 1.4e11], [2.2, 2.5]]
    assert len(script.read_points(path, 1)[0]) == 1
    for text, message in {
        "N,D\n1,2\n": "no column 'loss'", "": "6 are the least", "N,D,loss\n1,2,x\n": "could not convert",
        "N,D,loss\n1,2,-3\n": "must be positive", "N,D,loss\n1,2,nan\n": "must be positive",
        "N;D;loss\n1;2;3\n": "no column 'n' among n;d;loss",
        "N,D,loss\n1,2\n": "--points",
    }.items():  # fmt: skip
        path.write_text(text)
        with pytest.raises(common.BadInput, match=message):
            script.refit(*script.read_points(path, None), 10, 0)
    with pytest.raises(common.BadInput, match="No such file"):
        script.read_points(tmp_path / "none.csv", None)


@pytest.mark.skipif(not POINTS.exists(), reason="the published points are not in this repository")
def test_the_published_points(tmp_path):
    done = run_script(f"{NAME}.py", "--points", POINTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / f"out/{NAME}.json").read_text())
    exact = {"A": 477.826, "B": 2143.417, "E": 1.817218, "alpha": 0.347310, "beta": 0.367172}
    assert found["refit"]["objective"] == pytest.approx(1.0182740e-3, rel=1e-7)
    for name, value in exact.items():
        assert found["refit"][name] == pytest.approx(value, rel=1e-5)
    for name, se in {"E": 0.0265, "alpha": 0.0147, "beta": 0.0210, "a": 0.0192}.items():
        assert found["refit_se"][name] == pytest.approx(se, rel=0.2)  # theirs are of 250 redraws
    assert (
        found["refit"]["n"] == 240 and found["refit"]["replicates"] > 3900 and found["refit"]["starts"] > 4000
    )
    assert "D/N 17.9" in done.stdout


# The study
def test_the_minimum_of_a_parabola():
    x = np.log([1e4, 2e4, 5e4, 1e5])
    assert script.minimum(x, 3 * (x - 10.3) ** 2 + 1) == pytest.approx(10.3)
    assert math.isnan(script.minimum(x, -((x - 10.3) ** 2)))


def synthetic_runs(a):
    """Losses that are parabolas in ln N around N = C^a."""
    runs = []
    for C, sizes_of in script.STUDY.items():
        for d, L in sizes_of:
            N = script.total_parameters(d, L)
            loss = 1 + 0.1 * (math.log(N) - a * math.log(C) - math.log(7e4) + a * math.log(1e12)) ** 2
            runs.append({"budget": C, "d": d, "L": L, "loss": loss, "D": C / script.flops_per_token(d, L)})
    return runs


@given(st.floats(0.4, 0.7))
def test_exponent_of_parabolas(a):
    minima = script.iso_flop(synthetic_runs(a), script.total_parameters, seed=0, replicates=20)
    assert [m["N_opt"] for m in minima] == pytest.approx([7e4 * (C / 1e12) ** a for C in script.STUDY])
    assert all(m["tokens_per_param"] == pytest.approx(m["D_opt"] / m["N_opt"]) for m in minima)
    assert script.exponent(minima, False) == pytest.approx((a, a, a))


def few_runs(seed=0):
    return [script.Run(C, d, 1, 1e-2, seed, "a corpus") for C in (2e8, 4e8) for d in (16, 24)]


def test_a_resumed_study_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    started, bar = [], script.tqdm(disable=True)

    def here(target, jobs, tick):
        started.extend(jobs)
        for arguments in jobs.values():
            target(*arguments)
        tick()

    monkeypatch.setattr(common, "run_processes", here)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = script.train_all(few_runs(), tmp_path / "whole", 0, bar)
    script.train_all(few_runs()[:2], tmp_path / "parts", 0, bar)
    assert script.train_all(few_runs(), tmp_path / "parts", 0, bar) == whole
    count = len(started)
    assert script.train_all(few_runs(), tmp_path / "parts", 0, bar) == whole and len(started) == count
    for result, run in zip(whole, few_runs(), strict=True):
        assert 1 < result["loss"] < 6 and result["D"] == run.steps * 512 and result["d"] == run.d
    assert len({run.path(tmp_path) for run in [*few_runs(), *few_runs(1)]}) == 8
    few_runs()[0].path(tmp_path / "parts").write_text("")  # as a disk that was full may leave it
    assert script.train_all(few_runs(), tmp_path / "parts", 0, bar) == whole
    monkeypatch.setattr(script, "RECIPE", "edited")
    assert few_runs()[0].result(tmp_path / "parts") is None


# Over-training and the planner
@settings(max_examples=20)
@given(st.floats(1e9, 1e11), st.floats(1e9, 1e14))
def test_the_cheapest_model_is_where_brute_force_finds_it(N0, served):
    law = script.SARDANA
    loss = law.loss(*law.optimum(law.budget(N0)))
    N, D = script.cheapest(law, loss, served)
    assert law.loss(N, D) == pytest.approx(loss)
    sizes_tried = N * np.geomspace(0.5, 2, 4001)
    rest = loss - law.E - law.A / sizes_tried**law.alpha
    sizes_tried, rest = sizes_tried[rest > 0], rest[rest > 0]
    flops = 6 * sizes_tried * (law.B / rest) ** (1 / law.beta) + 2 * sizes_tried * served
    assert 6 * N * D + 2 * N * served <= flops.min() * (1 + 1e-6)
    assert script.justifying_tokens(law, N, D) == pytest.approx(served, rel=1e-3)


def test_the_published_case_of_over_training():
    law = script.SARDANA
    N, D = script.cheapest(law, law.loss(*law.optimum(law.budget(13e9))), 2e12)
    assert pytest.approx((6.97e9, 1.248e12), rel=1e-3) == (N, D)
    assert script.serve_table(2e12).notes.startswith("17.4% fewer FLOPs")


def test_the_plan_by_hand():
    p = script.plan(script.REFIT, "A100", 1000, 0.4, 2.0, N=7e9, D=140e9)
    assert p["flops"] == 5.88e21 and p["tokens_per_param"] == 20
    assert p["gpu_hours"] * p["goodput"] == pytest.approx(5.88e21 / (312e12 * 0.4) / 3600)
    assert p["days"] == pytest.approx(p["gpu_hours"] / 24000) and p["cost"] == 2 * p["gpu_hours"]
    assert p["memory"] == pytest.approx([112e9, 28.084e9, 14.098e9, 0.112e9]) and p["fits"] == [
        False,
        True,
        True,
        True,
    ]
    assert p["mwh"] == pytest.approx(p["gpu_hours"] * 400 / 1e6) and not p["extrapolated"]
    assert script.plan(script.REFIT, "H100", 8, 0.4, None, N=1e12, C=1e27)["extrapolated"]


@given(st.sampled_from(("N", "D", "C")), st.floats(1e10, 1e12))
def test_one_of_three_is_completed_by_the_law(which, value):
    value = value**2 if which == "C" else value
    p = script.plan(script.REFIT, "H100", 8, 0.4, None, **{which: value})
    N, D = script.LAWS[script.REFIT].optimum(p["flops"])
    assert (p["params"], p["tokens"]) == pytest.approx((N, D))
    assert {"N": p["params"], "D": p["tokens"], "C": p["flops"]}[which] == pytest.approx(value)


# The script
def test_quick_run_and_the_same_again(tmp_path):
    done = run_script(f"{NAME}.py", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / f"out/{NAME}").iterdir()}
    again = run_script(f"{NAME}.py", "--quick", cwd=tmp_path)
    assert again.stdout == done.stdout and len(kept) > 9
    assert kept == {path.name: path.stat().st_mtime_ns for path in (tmp_path / f"out/{NAME}").iterdir()}
    results = json.loads((tmp_path / f"out/{NAME}.json").read_text())
    assert {"refit", "refit_se", "isoflop", "exponents"} <= set(results)
    assert set(results["isoflop"][0]) >= {"C", "N_opt", "D_opt", "tokens_per_param"}
    assert (tmp_path / f"out/{NAME}.png").stat().st_size > 10_000


def test_the_recorded_runs(tmp_path):
    done = run_script(f"{NAME}.py", "--recorded", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recorded = (ROOT / f"results/{NAME}.txt").read_text().split("loss by learning rate")[1]
    assert (
        done.stdout.split("loss by learning rate")[1].split("approach 3")[0]
        == recorded.split("approach 3")[0]
    )
    minima = json.loads((ROOT / f"results/{NAME}.json").read_text())["isoflop"]
    N = [m["N_opt"] for m in minima]
    assert all(a < b for a, b in itertools.pairwise(N)) and all(m["inside"] for m in minima)
    ratios = [m["tokens_per_param"] for m in minima]
    claims = (ROOT / "CLAIMS.md").read_text()
    assert ", ".join(f"{ratio:.0f}" for ratio in ratios) + " at budgets of the same size" in claims


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    mark = f"mark_{tmp_path.name}_{time.time_ns()}"
    process = subprocess.Popen(
        command(f"{NAME}.py", "--quick"), cwd=tmp_path, env=os.environ | {"MARK": mark},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    folder, deadline = Path(tmp_path / f"out/{NAME}"), time.monotonic() + 60
    while not (folder.exists() and any(folder.glob("*.json"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130 and err.splitlines()[-1].endswith("interrupted")
    assert not processes_with(mark) and all(json.loads(path.read_text()) for path in folder.glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan"], "one or two of"),
        (["--plan", "--params", "7B", "--tokens", "1T", "--flops", "1e21"], "one or two of"),
        (["--params", "7B"], "--plan goes with"),
        (["--plan", "--params=-7B"], "positive number"),
        (["--plan", "--params", "0"], "positive number"),
        (["--plan", "--params", "seven"], "positive number"),
        (["--plan", "--params", "7B", "--mfu", "1.2"], "above 1"),
        (["--plan", "--params", "7B", "--gpu", "H900"], "invalid choice"),
        (["--points", "none.csv"], "No such file"),
        (["--plan", "--params", "7B", "--points", "none.csv"], "exclude each other"),
        (["--recorded", "--full"], "exclude each other"),
        (["--drop", "3"], "--drop goes with --points"),
        (["--plan", "--params", "1e200"], "positive number"),
        (["--plan", "--params", "7B", "--gpus", "100000000"], "leaves no time"),
    ],
)
def test_nonsense_takes_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{NAME}.py", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as end:
        common.run(script.main)
    told = capsys.readouterr().err
    assert end.value.code == 2 and message in told and told.count("\n") == 1


def test_quantities():
    assert [script.quantity(text) for text in ("7e9", "7B", "1.4T", "5M", "2k", "12")] == [
        7e9,
        7e9,
        1.4e12,
        5e6,
        2e3,
        12,
    ]
