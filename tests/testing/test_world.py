"""The seeded world: it passes on islands as they are, finds what is put into them by hand, and tells the same twice."""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import LIMIT

import fn.adapters.torchft.handing_over as handing_over
import fn.adapters.torchft.islands as islands
import fn.testing.world.__main__ as command
import fn.testing.world.world as world
from fn.testing.world import Event, Plan, Result, drawn, run, shrunk

FAST, MANY = range(100, 125), range(1000, 1500)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(seeds: Any) -> list[Result]:
    """Run seeds; none of them may fail, and enough has to happen in them."""
    found = [run(drawn(seed)) for seed in seeds]
    failed = [result for result in found if result.failure]
    assert not failed, shrunk(failed[0]).told()
    assert statistics.median(result.exchanges for result in found) >= 8
    assert statistics.median(result.faults for result in found) >= 3
    assert statistics.median(result.healings for result in found) >= 1
    return found


@pytest.mark.parametrize("first", FAST[::5])
def test_islands_with_faults_are_alike_in_time_whole_and_lose_nothing(first):
    check(range(first, first + 5))


@pytest.mark.reliability
@pytest.mark.parametrize("first", MANY[::50])
def test_hundreds_of_seeds_pass(first):
    check(range(first, first + 50))


@pytest.mark.parametrize("seed", range(4))
def test_without_faults_nothing_is_dropped(seed):
    result = run(drawn(seed)._replace(events=()))
    assert not result.failure, result.told()
    assert result.faults == 0
    assert not any(what.startswith("dropped") for *_, what in result.story)


def test_a_seed_tells_the_same_story_twice():
    first, again = (run(drawn(3)) for _ in range(2))
    assert first == again
    assert len(first.story) > 20


def edited(monkeypatch: Any, owner: Any, name: str, old: str, new: str, users: tuple[ModuleType, ...] = ()) -> None:
    """Put another line into a function of the adapter."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name}, patched>", "exec"), function.__globals__, made)
    for place in (owner, *users):
        monkeypatch.setattr(place, name, made[name])


def keeps_errors(monkeypatch: Any) -> None:
    edited(monkeypatch, handing_over, "become", "x.zero_()", "pass", (islands,))


def forgets_what_was_dropped(monkeypatch: Any) -> None:
    more = "self.entered, self.unsent, self.sent = 0.0, 0.0, self.sending\n"
    edited(monkeypatch, islands.Islands, "voted", "self.entered = 0.0\n", more)


def lands_alone(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "land", "self.meet()", "pass")


def heals_from_another(monkeypatch: Any) -> None:
    other = "(source_of(words) + rank) % len(words)"
    edited(monkeypatch, islands.Islands, "heal", "source_of(words)", other)


def begins_cold(monkeypatch: Any) -> None:
    edited(monkeypatch, islands, "optimizer", "        stage_exchange(opt, Round(0, 0))\n", "        pass\n", (world,))


def takes_an_old_quorum_for_a_new_one(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "group", "if manager.num_participants() != size and not is_new:", "if False:")


def counts_exchanges_only(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "stage", "of if of.line == line else", "of if True else")


def counts_from_before_it_was_healed(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "voted", "if trained and staged is not None:", "if trained:")


def believes_that_all_ranks_are_at_one_place(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "take", "while not all(ends for *_, ends in told):", "while False:")


def lets_ranks_count_apart(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "agreed", "if latest != self.manager.current_step():", "if False:")


def moves_on_before_all_ranks_of_an_island_have_come(monkeypatch: Any) -> None:
    later = "self.sending, self.steps = self.steps, steps"
    at_once = "self.sent, self.sending = self.sent + self.steps - steps, self.steps"
    edited(monkeypatch, islands.Islands, "stage", later, at_once)


def counts_the_last_step_of_a_warm_up(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "after_step", "self.sent, self.unsent = self.steps, 0.0", "self.unsent = 0.0")


def counts_the_tokens_of_a_warm_up(monkeypatch: Any) -> None:
    edited(
        monkeypatch, islands.Islands, "after_step", "self.sent, self.unsent = self.steps, 0.0", "self.sent = self.steps"
    )


def leaves_out_a_step_of_the_warm_up(monkeypatch: Any) -> None:
    edited(
        monkeypatch,
        islands.Islands,
        "stage",
        "all(of.warm for of in words if of.joined)",
        "all(of.warm for of in current)",
    )


AT_THE_START = Event(6.0, "kill in an exchange", 0, 1.0, 1)
"""The second message of the first quorum is on its way: it says who is behind."""

BEHIND_NOBODY = (Event(8.0, "cut", 0, 8.0, 0), Event(16.47, "kill", 1, 1.0, 0))
"""Who was cut off hears that it is behind, and the other island is lost before it sends its state."""


def votes_twice(monkeypatch: Any) -> None:
    edited(monkeypatch, islands.Islands, "land", "if self.asks:", "if True:")


PATCHES: list[tuple[Callable[[Any], None], Plan]] = [
    (keeps_errors, drawn(0)),
    (forgets_what_was_dropped, drawn(24)),
    (lands_alone, drawn(40)),
    (heals_from_another, drawn(0)),
    (begins_cold, drawn(0)),
    # What the world has found in the adapter as it was:
    (takes_an_old_quorum_for_a_new_one, drawn(14)),
    (counts_exchanges_only, drawn(245)),
    (counts_from_before_it_was_healed, drawn(1852)),
    (lets_ranks_count_apart, drawn(387)),
    (counts_the_last_step_of_a_warm_up, drawn(405376)),
    (counts_the_tokens_of_a_warm_up, drawn(608842)),
    (moves_on_before_all_ranks_of_an_island_have_come, drawn(300319)),
    (leaves_out_a_step_of_the_warm_up, drawn(608127)),
    (votes_twice, drawn(367)._replace(events=BEHIND_NOBODY)),
    (believes_that_all_ranks_are_at_one_place, drawn(33)._replace(events=(AT_THE_START,))),
]
"""What makes the adapter wrong, and a plan that finds it."""


@pytest.mark.parametrize(("patch", "plan"), PATCHES, ids=[patch.__name__ for patch, _ in PATCHES])
def test_what_is_wrong_with_the_adapter_is_found(monkeypatch, patch, plan):
    result = run(plan)
    assert not result.failure, result.told()
    patch(monkeypatch)
    assert run(plan).failure


def test_a_failing_seed_is_shrunk_and_told(monkeypatch):
    keeps_errors(monkeypatch)
    failing = run(drawn(0))
    less = shrunk(failing)
    assert less.failure
    assert len(less.plan.events) < len(failing.plan.events)
    assert not any(
        run(less.plan._replace(events=less.plan.events[:i] + less.plan.events[i + 1 :])).failure
        for i in range(len(less.plan.events))
    )
    lines = less.told().splitlines()
    assert lines[-1] == less.failure
    assert any("island 0" in line and line.split()[1] == "s" for line in lines)


def test_the_command_prints_a_line_a_seed_and_their_sum():
    words = [sys.executable, "-m", "fn.testing.world", "--seed", "1", "--count", "2"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    *lines, last = told.stdout.splitlines()
    assert told.returncode == 0
    assert [line.split(";")[0] for line in lines] == ["seed 1: passed", "seed 2: passed"]
    assert last.startswith("2 seeds, 2 of which count: ")
    assert "; failed: none; " in last


def test_the_command_tells_a_failing_seed_and_ends_with_1(monkeypatch, capsys):
    keeps_errors(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["world", "--seed", "0"])
    assert command.main() == 1
    told = capsys.readouterr().out
    assert told.startswith("seed 0: FAILED; ")
    assert "becomes a copy of another island" in told
    assert "failed: [0]; " in told.splitlines()[-1]
