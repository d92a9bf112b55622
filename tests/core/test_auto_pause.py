"""Storing is paused after a window of negative balance, tried again at growing intervals, and not paused by noise."""

from __future__ import annotations

from collections.abc import Generator
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.auto_pause import MAX_PAUSE_S, NOISE_S, WINDOW_S, AutoPause, Storing

BAD_S = -2 * NOISE_S

NETS = st.sampled_from([BAD_S, BAD_S, BAD_S, -NOISE_S, 0.0, 1.0, None])
STEPS = st.sampled_from([0.0, 1.0, 60.0, 200.0, 700.0, 3000.0])
OBSERVATIONS = st.lists(st.tuples(NETS, STEPS, st.sampled_from([False] * 9 + [True])), max_size=60)


def is_bad(net_s: float | None) -> bool:
    return net_s is not None and net_s < -NOISE_S


def model() -> Generator[Storing, tuple[float | None, float], None]:
    """The same decision, written in the order of time: receives balance and time, and yields the state after it."""
    while True:
        bad: list[float] = []
        while not bad or bad[-1] - bad[0] < WINDOW_S:
            net_s, now_s = yield Storing.ON
            bad = [*bad, now_s] if is_bad(net_s) else []
        pause_s = WINDOW_S
        while is_bad(net_s):
            end_s = now_s + pause_s
            while now_s < end_s:
                net_s, now_s = yield Storing.PAUSED
            end_s = now_s + WINDOW_S
            while now_s < end_s:
                net_s, now_s = yield Storing.PROBING
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


@given(OBSERVATIONS)
def test_states_of_any_observations_are_the_models(
    observations: list[tuple[float | None, float, bool]],
) -> None:
    pause, expected, now_s = AutoPause(), model(), 0.0
    next(expected)
    for net_s, step_s, is_reset in observations:
        now_s += step_s
        if is_reset:
            pause.restart()
            expected = model()
            assert pause.state is next(expected)
        before = pause.state
        changed = pause.observe(net_s, now_s)
        assert pause.state is expected.send((net_s, now_s))
        assert changed is (pause.state is not before)


@given(st.lists(st.tuples(st.sampled_from([-NOISE_S, 0.0, None]), STEPS), max_size=60))
def test_storing_is_never_paused_by_noise(observations: list[tuple[float | None, float]]) -> None:
    pause, now_s = AutoPause(), 0.0
    for net_s, step_s in observations:
        now_s += step_s
        assert not pause.observe(net_s, now_s)


def test_pauses_double_up_to_a_bound_while_trials_fail() -> None:
    pause = AutoPause()
    states = []
    for minute in range(3000):
        pause.observe(BAD_S, 60.0 * minute)
        states.append(pause.state)
    runs = [(state, len(list(run))) for state, run in groupby(states)]
    assert runs[0] == (Storing.ON, 10)
    pauses = [minutes for state, minutes in runs[:-1] if state is Storing.PAUSED]
    assert pauses[:5] == [10, 20, 40, 80, 160]
    assert set(pauses[5:]) == {MAX_PAUSE_S / 60}
    assert {minutes for state, minutes in runs[1:-1] if state is Storing.PROBING} == {10}


def test_first_pause_after_a_good_trial_is_short_again() -> None:
    pause = AutoPause()
    minute = 0
    while pause.pause_s == WINDOW_S:
        minute += 1
        pause.observe(BAD_S, 60.0 * minute)
    while pause.state is not Storing.ON:
        minute += 1
        pause.observe(0.0, 60.0 * minute)
    assert pause.pause_s == WINDOW_S
