"""A failing seed, told with as few faults as it takes."""

from __future__ import annotations

from fn.testing.world.world import Result, run


def shrunk(result: Result) -> Result:
    """Return a failing run with the fewest events: none of them can be left out.

    What is left may fail in another way than before: any failure is one.
    """
    while True:
        events = result.plan.events
        for i in reversed(range(len(events))):
            less = run(result.plan._replace(events=events[:i] + events[i + 1 :]))
            if less.failure:
                result = less
                break
        else:
            return result


def story_of(result: Result) -> str:
    """Return what happened in a run, a line each: time, who, what."""
    events = "\n".join(map(str, result.plan.events)) or "no fault"
    lines = [f"{time:8.2f} s  {who:<16}  {what}" for time, who, what in result.story]
    return "\n".join(
        [f"seed {result.plan.seed}: {result.plan}", events, "", *lines, "", f"{result.failure or 'nothing is wrong'}"]
    )
