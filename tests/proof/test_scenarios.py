# SPDX-License-Identifier: Apache-2.0
"""The questions: which set-up asks which, and what an engine is given, on a stand-in
that answers nothing."""

import contextlib

import pytest

from proof import arms, engine, faults, model, scenarios

MAX_MODEL_LEN = 8192  # engine.Engine's


class Recorder:
    """In the place of an engine: keeps what it is asked, answers from the prefix cache."""

    def __init__(self):
        self.asked, self.steps, self.preemptions = [], [], 1

    def run(self, scenario, requests, later=(), after_steps=0):
        self.asked.append((scenario, [*requests, *later], len(later), after_steps))
        return [scenarios.Row(scenario, r.name, "forced", 64, []) for r in (*requests, *later)]

    def blocks_of(self, request):
        return 10

    def blocks_left(self, count):
        self.steps.append(("left", count))
        return contextlib.nullcontext()

    def evict_later_half(self, name):
        self.steps.append(("evict", name))

    def forget(self, host=False):
        self.steps.append(("forget",))


def _asked(name):
    recorder = Recorder()
    scenarios.SCENARIOS[name](recorder)
    return recorder


ALL = pytest.mark.parametrize("name", scenarios.SCENARIOS)


def _requests(name):
    return [request for _, requests, *_ in _asked(name).asked for request in requests]


@ALL
def test_prompts_are_the_same_every_time(name):
    assert _asked(name).asked == _asked(name).asked


@ALL
def test_prompts_are_in_range(name):
    variants = [s.variant for s in engine.SETUPS.values() if name in s.scenarios]
    words = min(model.config(v)["text_config"]["vocab_size"] for v in variants)
    noise = model.config("dspark")["text_config"]["dspark_noise_token_id"]
    for request in _requests(name):
        tokens = [t for t in request.prompt if t != model.IMAGE_TOKEN] + list(request.forced)
        assert all(3 <= token < min(words, noise) for token in tokens)  # 0, 1, 2: bos, eos, pad
        assert 0 < len(request.prompt) + len(request.forced) <= MAX_MODEL_LEN
        assert request.since < len(request.prompt)
        if any(request.images):
            assert variants == ["vision"]
        assert request.prompt.count(model.IMAGE_TOKEN) == len(request.images)


@ALL
def test_names_are_unique(name):
    for _, requests, *_ in _asked(name).asked:
        names = [request.name for request in requests]
        assert len(set(names)) == len(names)


@ALL
def test_the_last_question_carries_the_scenarios_name(name):
    """Rows of what only prepares are thrown away."""
    assert _asked(name).asked[-1][0] == name


@ALL
def test_a_scenario_that_reads_the_prefix_cache_starts_from_an_empty_one(name):
    # Asking for a prompt's own log-probabilities switches hits off.
    if any(request.forced for request in _requests(name)):
        assert _asked(name).steps[0] == ("forget",)


def test_prompts_of_one_scenario_differ():
    for name in scenarios.SCENARIOS:
        prompts = [r.prompt[:40] for r in _requests(name) if len(r.prompt) > 4]
        shared = len(prompts) - len(set(prompts))
        # A cold and a warm question share their beginning; images are of one text.
        assert shared == {"warm": 1, "evicted": 1, "offloaded": 1, "image": 2}.get(name, 0)


def test_other_names_give_other_tokens():
    assert scenarios.tokens("a", 50) == scenarios.tokens("a", 60)[:50]
    assert scenarios.tokens("a", 50) != scenarios.tokens("b", 50)


@pytest.mark.parametrize("name", ["warm", "evicted", "offloaded"])
def test_the_prefix_ends_at_the_same_token_for_blocks_of_64_and_128(name):
    cold, *_, again = _requests(name)
    before = cold.prompt + cold.forced
    pairs = enumerate(zip(before, again.prompt, strict=False))
    common = next(i for i, (one, other) in pairs if one != other)
    assert common >= len(cold.prompt)
    hits = {common // block * block for block in (64, 128)}
    assert len(hits) == 1
    # More than one chunk of prefill is saved, and something is left to do.
    assert hits.pop() > scenarios.CHUNK
    assert len(again.prompt) > common


def test_evicted_evicts_what_the_cold_question_left():
    recorder = _asked("evicted")
    assert recorder.steps == [("forget",), ("evict", "cold")]
    assert [scenario for scenario, *_ in recorder.asked] == ["cold", "evicted"]


def test_preempted_leaves_room_for_half_of_the_requests():
    recorder = _asked("preempted")
    assert ("left", 30) in recorder.steps
    (_, requests, *_) = recorder.asked[-1]
    assert len(requests) > 3


def test_preempted_without_a_preemption_is_an_error():
    recorder = Recorder()
    recorder.preemptions = 0
    with pytest.raises(RuntimeError, match="nothing was preempted: 30 blocks, 10 for one"):
        scenarios.preempted(recorder)


def test_mixed_asks_long_prompts_while_others_decode():
    ((_, requests, later, after),) = _asked("mixed").asked
    early, late = requests[:-later], requests[-later:]
    assert all(after < len(request.forced) for request in early)
    assert all(len(request.prompt) > scenarios.CHUNK for request in late)


def test_lengths_lie_around_window_page_and_chunk():
    lengths = {len(request.prompt) for request in _requests("short")}
    window = model.config("text")["text_config"]["sliding_window"]
    assert {64, window - 1, window + 1} <= lengths
    assert max(len(r.prompt) for r in _requests("long")) > 2 * scenarios.CHUNK
    (far,) = _requests("far")
    text = model.config("text")["text_config"]
    chosen = max(2 * text["index_topk"], text["candidate_topk_blocks"] * 8)
    assert chosen <= far.since < len(far.prompt)


# --- set-ups -----------------------------------------------------------------------

SETUPS = pytest.mark.parametrize("name", engine.SETUPS)


@SETUPS
def test_a_setup_names_what_there_is(name):
    setup = engine.SETUPS[name]
    assert set(setup.scenarios) <= scenarios.SCENARIOS.keys()
    assert setup.variant in model.VARIANTS
    assert set(setup.arms) <= arms.ARMS.keys()
    assert bool(setup.scenarios) == setup.loads
    if setup.like:
        other = engine.SETUPS[setup.like]
        assert set(setup.scenarios) <= set(other.scenarios)
        assert setup.variant == other.variant
        assert "stock" in other.arms
    elif setup.loads:
        # Something is compared, and its noise is known.
        assert "stock" in setup.arms and len(setup.arms) > 1
        assert "stock-again" in setup.arms or setup.repeats > 1


def test_every_scenario_is_asked():
    asked = {name for setup in engine.SETUPS.values() for name in setup.scenarios}
    assert asked == scenarios.SCENARIOS.keys()


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_planted_somewhere(fault):
    places = [
        setup
        for setup in engine.SETUPS.values()
        if setup.faults and setup.variant == fault.variant and fault.scenario in setup.scenarios
    ]
    assert places
    # Under CUDA graphs Python does not run every step; the fork's arm plants them.
    assert all(setup.options["enforce_eager"] and "fork" in setup.arms for setup in places)


def test_faults_have_their_own_names():
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS)


def test_images_are_asked_only_where_they_are_taken():
    most = max(len(request.images) for request in _requests("image"))
    for setup in engine.SETUPS.values():
        if "image" in setup.scenarios:
            assert setup.options["limit_mm_per_prompt"]["image"] >= most
            assert setup.options["language_model_only"] is False
