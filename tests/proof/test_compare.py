# SPDX-License-Identifier: Apache-2.0
"""What the comparison says of answers whose noise and whose fault are known."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proof import arms, compare

COUNT = 4000
SIGMA = 0.05
"""Of one run; two runs differ by sqrt(2) times that, well above compare.FLOOR."""
PAIR = SIGMA * 2**0.5


class Noise:
    """Runs of one build: the same truth, and noise of its own in every run."""

    def __init__(self, seed=0, count=COUNT):
        self.draw = np.random.default_rng(seed)
        self.truth = self.draw.normal(-5, 2, count)

    def run(self, shift=0.0, share=1.0):
        hit = np.arange(len(self.truth)) < share * len(self.truth)
        noise = self.draw.normal(0, SIGMA, len(self.truth))
        return self.truth + noise + shift * PAIR * hit

    def runs(self, count=2, **more):
        return [{"answers": [self.run(**more)]} for _ in range(count)]


def _lines(folder, reference="stock"):
    return {line.compared: line for line in compare.table(compare.load(folder.folder), reference)}


def _reference(result_folder, noise, **more):
    result_folder.add("stock", "eager", noise.runs(), **more)
    result_folder.add("stock-again", "eager", noise.runs(), **more)


def test_the_same_build_lies_near_one(result_folder):
    noise = Noise()
    _reference(result_folder, noise)
    result_folder.add("fork", "eager", noise.runs())
    lines = _lines(result_folder)
    assert list(lines) == ["stock itself", "fork"]
    assert lines["stock itself"].verdict == "-"
    assert lines["fork"].verdict == "same"
    assert lines["fork"].excess == pytest.approx(1, abs=0.1)
    assert lines["fork"].positions == COUNT
    # The median of |N(0, PAIR)|.
    assert lines["stock itself"].noise[0] == pytest.approx(0.6745 * PAIR, rel=0.05)


def _folded(share, shift):
    """The quantile of |x + shift| for a standard normal x."""
    cdf, low, high = NormalDist().cdf, 0.0, shift + 10
    for _ in range(60):
        middle = (low + high) / 2
        if cdf(middle - shift) - cdf(-middle - shift) < share:
            low = middle
        else:
            high = middle
    return low


@settings(max_examples=30, deadline=None)
@given(shift=st.floats(0, 40), seed=st.integers(0, 2**32))
def test_a_shift_gives_the_excess_that_theory_predicts(shift, seed):
    noise = Noise(seed)
    runs = [noise.run() for _ in range(2)]
    again = [noise.run() for _ in range(2)]
    moved = [noise.run(shift) for _ in range(2)]
    pairs = compare.differences(runs, again)
    right = compare.quantiles(pairs)
    found = compare.quantiles(compare.differences(moved, runs))
    predicted = max(_folded(q, shift) / _folded(q, 0) for q in compare.QUANTILES)
    assert compare.excess(found, right, len(pairs)) == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize("shift, verdict", [(0, "same"), (3, "differs"), (30, "differs")])
def test_an_arms_verdict(result_folder, shift, verdict):
    noise = Noise()
    _reference(result_folder, noise)
    result_folder.add("fork", "eager", noise.runs(shift=shift))
    assert _lines(result_folder)["fork"].verdict == verdict


def test_a_fault_at_a_fifth_of_the_positions_is_seen_in_the_tail(result_folder):
    noise = Noise()
    _reference(result_folder, noise)
    planted = [{"fault": "late", **run} for run in noise.runs(1, shift=30, share=0.2)]
    result_folder.add("fork", "eager", [*noise.runs(), *planted])
    line = _lines(result_folder)["late"]
    medians = line.quantiles[0] / line.noise[0]
    assert medians < 2  # a median alone would not find it
    assert line.excess > compare.FOUND
    assert line.verdict == "found"


def test_a_fault_without_effect_is_missed(result_folder):
    noise = Noise()
    _reference(result_folder, noise)
    result_folder.add("fork", "eager", [*noise.runs(), {"fault": "none", **noise.runs(1)[0]}])
    assert _lines(result_folder)["none"].verdict == "missed"


def test_a_build_that_repeats_itself_is_measured_by_the_floor(result_folder):
    values = np.linspace(-9, 0, 100)
    for arm in ("stock", "stock-again"):
        result_folder.add(arm, "eager", [{"answers": [values]}] * 2)
    result_folder.add("fork", "eager", [{"answers": [values + 3 * compare.FLOOR]}])
    lines = _lines(result_folder)
    assert lines["stock itself"].noise == (0, 0, 0)
    assert lines["fork"].excess == pytest.approx(3)


@pytest.mark.parametrize("arm, verdict", [("fork-sm120", "same"), ("fork-units", "differs")])
def test_another_kernel_rounds_where_stock_repeats_itself(result_folder, arm, verdict):
    """It is measured by what rounding makes of answers elsewhere, and by no less."""
    noise, values = Noise(), np.linspace(-9, 0, 100)
    for name in ("stock", "stock-again"):
        short = [{"scenario": "short", **run} for run in noise.runs()]
        result_folder.add(name, "eager", [*short, *[{"scenario": "few", "answers": [values]}] * 2])
    short = [{"scenario": "short", **run} for run in noise.runs()]
    rounded = values + noise.draw.normal(0, PAIR, 100)
    result_folder.add(arm, "eager", [*short, {"scenario": "few", "answers": [rounded]}])
    lines = compare.table(compare.load(result_folder.folder))
    (line,) = (line for line in lines if (line.scenario, line.compared) == ("few", arm))
    assert line.verdict == verdict


@pytest.mark.parametrize("shift, verdict", [(12, "missed"), (40, "found")])
def test_a_fault_stands_out_from_its_own_arm(result_folder, shift, verdict):
    values = np.linspace(-9, 0, 100)
    for arm in ("stock", "stock-again"):
        result_folder.add(arm, "eager", [{"answers": [values]}] * 2)
    right = {"answers": [values + 6 * compare.FLOOR]}
    planted = {"fault": "slots", "answers": [values + shift * compare.FLOOR]}
    result_folder.add("fork-sm120", "eager", [right, planted])
    assert _lines(result_folder)["slots (fork-sm120)"].verdict == verdict


@pytest.mark.parametrize("count", [1, 39])
def test_a_nan_in_an_arm_is_an_infinite_difference(result_folder, count):
    noise = Noise(count=1000)
    _reference(result_folder, noise)
    run = noise.run()
    run[:count] = np.nan
    result_folder.add("fork", "eager", [{"answers": [run]}])
    line = _lines(result_folder)["fork"]
    assert np.isinf(line.differences).sum() == 2 * count  # of two pairs
    # Seen where it reaches a quantile.
    assert (line.verdict == "differs") == (count > 10)
    assert line.summary()["excess"] is None or count < 10


def test_a_nan_in_the_reference_is_an_error(result_folder):
    noise = Noise(count=100)
    broken = noise.run()
    broken[3] = np.nan
    result_folder.add("stock", "eager", [{"answers": [broken]}, *noise.runs(1)])
    result_folder.add("stock-again", "eager", noise.runs())
    result_folder.add("fork", "eager", noise.runs())
    with pytest.raises(ValueError, match="not finite"):
        _lines(result_folder)


def test_a_nan_in_the_reference_is_an_error_without_other_arms(result_folder):
    """As with --local, where all that is compared with the fork is the fork."""
    noise = Noise(count=100)
    broken = noise.run()
    broken[3] = np.nan
    result_folder.add("fork", "eager", [{"answers": [broken]}, *noise.runs(1)])
    result_folder.add("fork-again", "eager", noise.runs())
    with pytest.raises(ValueError, match="not finite"):
        _lines(result_folder, "fork")


@pytest.mark.parametrize("arm", ["stock-again", "fork"])
def test_runs_of_other_lengths_are_an_error(result_folder, arm):
    noise = Noise(count=100)
    for name in ("stock", "stock-again", "fork"):
        values = [noise.run()[: 99 if name == arm else 100] for _ in range(2)]
        result_folder.add(name, "eager", [{"answers": [v]} for v in values])
    with pytest.raises(ValueError, match=r"runs of \[99, 100\] positions cannot be compared"):
        _lines(result_folder)


def test_without_a_second_process_runs_are_compared_with_each_other(result_folder):
    noise = Noise()
    result_folder.add("stock", "no-replay", noise.runs(3))
    result_folder.add("fork", "no-replay", noise.runs())
    lines = _lines(result_folder)
    assert len(lines["stock itself"].differences) == 3 * COUNT
    assert len(lines["fork"].differences) == 2 * 3 * COUNT
    assert lines["fork"].verdict == "same"


def test_a_setup_that_is_like_another_is_compared_with_its_reference(result_folder):
    noise, other = Noise(1), Noise(2)
    result_folder.add("stock", "graphs", noise.runs())
    result_folder.add("stock", "eager", other.runs())
    result_folder.add("fork-pages", "graphs", noise.runs())
    result_folder.add("fork-pages", "block-128", noise.runs(), like="graphs")
    result_folder.add("fork-pages", "eager", noise.runs())
    lines = compare.table(compare.load(result_folder.folder))
    found = {(line.setup, line.compared): line.verdict for line in lines}
    assert found == {
        ("graphs", "stock itself"): "-",
        ("graphs", "fork-pages"): "same",
        ("graphs", "fork-pages, block-128"): "same",
        ("eager", "stock itself"): "-",
        ("eager", "fork-pages"): "differs",
    }


def test_another_split_into_blocks_is_allowed_more(result_folder):
    assert arms.SAME < arms.ARMS["fork-pages"].same < compare.FOUND
    noise = Noise()
    _reference(result_folder, noise)
    # Twice the noise: between what the two kinds of arm may show.
    wide = [{"answers": [noise.truth + 2.6 * (noise.run() - noise.truth)]} for _ in range(2)]
    for arm in ("fork", "fork-pages"):
        result_folder.add(arm, "eager", wide)
    lines = _lines(result_folder)
    assert lines["fork"].verdict == "differs"
    assert lines["fork-pages"].verdict == "same"


def test_a_run_in_error_is_left_out_and_told(result_folder):
    noise = Noise()
    _reference(result_folder, noise)
    broken = {"error": "RuntimeError: no", "answers": [[0.0]]}
    fault = {"fault": "slot", "error": "ValueError: bad", "answers": []}
    lost = {"scenario": "warm", "error": "KeyError: 'x'", "answers": []}
    result_folder.add("fork", "eager", [broken, *noise.runs(1), fault, lost])
    lines = _lines(result_folder)
    assert list(lines) == ["stock itself", "fork"]
    assert lines["fork"].verdict == "same"
    errors = [e for r in compare.load(result_folder.folder) for e in r.errors()]
    assert errors == [
        "eager, fork, decode: RuntimeError: no",
        "eager, fork, decode, slot planted: ValueError: bad",
        "eager, fork, warm: KeyError: 'x'",
    ]


def test_hits_are_those_of_the_first_good_run(result_folder):
    values = np.zeros(4)
    for arm, cached in (("stock", 128), ("stock-again", 128), ("fork", 64)):
        runs = [{"error": "x", "answers": [(7, values)]}, {"answers": [(0, values), (cached, [])]}]
        result_folder.add(arm, "eager", runs)
    line = _lines(result_folder)["fork"]
    assert (line.hits, line.wanted) == ((0, 64), (0, 128))


def test_another_reference(result_folder):
    noise = Noise()
    result_folder.add("fork", "eager", noise.runs())
    result_folder.add("fork-again", "eager", noise.runs())
    lines = _lines(result_folder, "fork")
    assert list(lines) == ["fork itself"]
    assert _lines(result_folder, "stock") == {}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"arm": "stock"}', "\x00"])
def test_a_file_that_is_no_result_is_named(tmp_path, content):
    (tmp_path / "eager.stock.json").write_text(content)
    with pytest.raises(ValueError, match=r"eager\.stock\.json: not a result of proof\.engine"):
        compare.load(tmp_path)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_quantiles_are_values_that_occur(values):
    found = compare.quantiles(np.abs(np.array(values)))
    assert set(found) <= {abs(v) for v in values}
    assert list(found) == sorted(found)


def test_one_good_run_of_the_reference_is_a_clear_error(result_folder):
    """The noise needs two runs."""
    noise = Noise(count=50)
    result_folder.add("stock", "no-replay", [*noise.runs(1), {"error": "RuntimeError: no"}])
    result_folder.add("fork", "no-replay", noise.runs())
    with pytest.raises(ValueError, match="no-replay"):
        _lines(result_folder)


def test_a_second_process_that_answered_nothing_leaves_the_first_ones_noise(result_folder):
    noise = Noise(count=50)
    result_folder.add("stock", "eager", noise.runs())
    result_folder.add("stock-again", "eager", [{"error": "RuntimeError: no"}])
    result_folder.add("fork", "eager", noise.runs())
    assert len(_lines(result_folder)["stock itself"].differences) == 50


@pytest.mark.parametrize("size, counts", [(99, 1), (100, 2), (999, 2), (1000, 3)])
def test_a_quantile_counts_where_ten_differences_lie_above_it(size, counts):
    ratios = (1.0, 2.0, 3.0)
    assert compare.excess(ratios, (1.0, 1.0, 1.0), size) == ratios[counts - 1]


def test_a_known_blind_spot_is_no_miss(result_folder, monkeypatch):
    noise = Noise()
    _reference(result_folder, noise)
    result_folder.add("fork", "eager", [*noise.runs(), {"fault": "none", **noise.runs(1)[0]}])
    monkeypatch.setattr(compare.faults, "known_blind", lambda name: name == "none")
    assert _lines(result_folder)["none"].verdict == "blind"
