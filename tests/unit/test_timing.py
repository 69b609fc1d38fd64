"""Timing of several runs against each other."""

import time

import pytest
import torch

from cudnn_fusion import timing
from cudnn_fusion.timing import FINALISTS, FIRST_ROUNDS, SEARCHES, Timing, time_interleaved

CPU = torch.device("cpu")


class Clock:
    """A clock that moves only by what runs take."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.load = 1.0
        self.order = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def run(self, name, microseconds):
        def call():
            self.order.append(name)
            self.now += microseconds(self) * self.load * 1e-6

        return call if callable(microseconds) else self.run(name, lambda _: microseconds)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def fastest(timings):
    final = {index: t for index, t in timings.items() if t.final}
    return min(final, key=lambda index: final[index].median_us)


def test_every_run_gets_a_median_and_a_spread(clock):
    timings = time_interleaved([clock.run("a", 100), clock.run("b", 120)], CPU)
    assert timings[0].median_us == pytest.approx(100)
    assert timings[1].median_us == pytest.approx(120)
    assert timings[0].spread_us == pytest.approx(0, abs=1e-6)
    assert timings[0].final
    assert timings[1].final


def test_runs_take_turns(clock):
    time_interleaved([clock.run("a", 100), clock.run("b", 120)], CPU)
    assert clock.order[4:10] == ["a", "b"] * 3


def test_slow_runs_leave_early_and_those_kept_stay(clock):
    runs = [clock.run(str(us), us) for us in (100, 300, 250, 110)]
    timings = time_interleaved(runs, CPU, keep=(1,))
    assert [timings[i].final for i in range(4)] == [True, True, False, True]
    assert timings[2].median_us == pytest.approx(250)
    assert clock.order.count("250") == 2 + FIRST_ROUNDS


def test_hopeless_runs_leave_at_once_and_those_kept_are_timed_to_the_end(clock):
    runs = [clock.run(str(us), us) for us in (100, 1000, 900, 110)]
    timings = time_interleaved(runs, CPU, keep=(1,))
    assert [timings[i].final for i in range(4)] == [True, True, False, True]
    assert clock.order.count("900") == 3
    assert timings[2].median_us == pytest.approx(900)
    assert timings[1].median_us == pytest.approx(1000)


def test_a_run_that_was_held_up_once_is_not_hopeless(clock):
    calls = []

    def held_up(_):
        calls.append(1)
        return 5000 if len(calls) == 2 else 90

    timings = time_interleaved([clock.run("a", 100), clock.run("b", held_up)], CPU)
    assert fastest(timings) == 1


def test_only_so_many_go_on(clock):
    timings = time_interleaved([clock.run(str(n), 100 + n) for n in range(20)], CPU)
    assert sorted(i for i, t in timings.items() if t.final) == list(range(FINALISTS))
    assert len(timings) == 20


def test_who_left_in_quiet_times_does_not_win(clock):
    """The load doubles behind the first rounds: what was measured before is not comparable with it."""
    calls = []

    def fast(_):
        calls.append(1)
        clock.load = 4.0 if len(calls) > 2 + FIRST_ROUNDS else 1.0
        return 100

    timings = time_interleaved([clock.run("fast", fast), clock.run("slow", 200)], CPU)
    assert timings[0].median_us > timings[1].median_us
    assert fastest(timings) == 0


def test_a_run_that_fails_leaves_and_the_others_are_timed(clock):
    calls = []

    def fails_later(_):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("out of memory")
        return 50

    failed = {}
    runs = [clock.run("later", fails_later), clock.run("sound", 100), clock.run("sound too", 130)]
    timings = time_interleaved(runs, CPU, on_failure=lambda index, error: failed.update({index: str(error)}))
    assert failed == {0: "out of memory"}
    assert sorted(timings) == [1, 2]
    assert fastest(timings) == 1


def test_a_run_that_fails_at_once_leaves(clock):
    def fails(_):
        raise RuntimeError("no")

    failed = []
    timings = time_interleaved([clock.run("bad", fails)], CPU, on_failure=lambda i, e: failed.append(i))
    assert (timings, failed) == ({}, [0])
    with pytest.raises(RuntimeError, match="no"):
        time_interleaved([clock.run("bad", fails)], CPU)


def test_the_fastest_leads_to_runs_near_it_until_none_is_faster(clock):
    near = {100: (130, 80), 80: (90, 60), 60: (70,)}
    times, asked = [200, 100], []

    def further(index):
        asked.append(times[index])
        added = near[times[index]]
        times.extend(added)
        return [clock.run(str(us), us) for us in added]

    timings = time_interleaved([clock.run(str(us), us) for us in times], CPU, further=further)
    assert asked == [100, 80, 60]
    assert sorted(timings) == list(range(len(times)))
    assert times[fastest(timings)] == 60
    assert all(timings[i].median_us == pytest.approx(us) for i, us in enumerate(times))


def test_a_search_ends_where_its_rounds_do(clock):
    times = [1000]

    def further(index):
        times.append(times[index] - 10)
        return [clock.run("next", times[-1])]

    timings = time_interleaved([clock.run("first", 1000)], CPU, further=further)
    assert len(timings) == 1 + SEARCHES


def test_no_search_starts_from_what_is_refused(clock):
    asked = []
    time_interleaved(
        [clock.run("wrong", 10), clock.run("right", 20)],
        CPU,
        accept=lambda index: index == 1,
        further=lambda index: asked.append(index) or [],
    )
    assert asked == [1]


def test_real_runs_are_told_apart():
    timings = time_interleaved([lambda: time.sleep(0.002), lambda: time.sleep(0.0005)], CPU)
    assert fastest(timings) == 1
    assert timings[0].median_us >= 2000
    assert isinstance(timings[0], Timing)
