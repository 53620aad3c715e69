"""Scripts of single questions: runs that 0/1 Adam loses, and methods as they come."""

from __future__ import annotations

from benchmarks.atlas import as_it_comes, lost
from benchmarks.atlas.paired import rate_at
from benchmarks.atlas.tasks import TASKS
from fn.planner.recommend import PICKS


def test_a_run_is_lost_below_an_accuracy_and_the_seed_that_chose_the_rate_does_not_count() -> None:
    rows = [{"method": "adamw", "seed": seed, "accuracy": x} for seed, x in enumerate((0.1, 0.89, 0.91, 0.96))]
    assert lost.table({"rows": rows}).splitlines()[2] == "| adamw | 1 of 3 | 0.920 | 0.890 |"


def test_a_rate_is_chosen_before_any_run_that_counts() -> None:
    tried = [{"method": "adamw", "seed": lost.TUNED_ON, "lr": run.lr, "tuning": 1.0} for run in lost.missing([])]
    assert len(tried) == 3
    tried[1]["tuning"] = 0.5
    runs = list(lost.missing(tried))
    assert {run.lr for run in runs} == {rate_at(lost.START, 0)}
    assert {(run.method, run.seed) for run in runs} == {(name, seed) for name in lost.METHODS for seed in lost.SEEDS}


def test_methods_run_as_they_come_on_the_seeds_that_the_atlas_shows() -> None:
    runs = [run for run, _ in as_it_comes.wanted()]
    for task in as_it_comes.ON:
        own = {run.method for run in runs if run.task == task}
        assert {pick.name.split(",")[0] for pick in PICKS} <= {name.split(",")[0] for name in own}
        assert {run.seed for run in runs if run.task == task} == set(TASKS[task].seeds)
