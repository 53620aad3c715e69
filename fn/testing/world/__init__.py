"""Islands in a world that a seed makes: kills, cuts and clocks, in simulated time, by the thousand.

    python -m fn.testing.world --seed 0 --count 100

Take it after a change to `fn.adapters.torchft`. Its optimizer runs as it is, a thread for each rank, of which a seeded
scheduler lets exactly one run at a time; torchft's Manager and lighthouse, the network and the clock are stand-ins, so
torchft is not needed. Judged are, by books of the world's own: who wrote an exchange is bitwise alike; nobody waits
beyond a deadline; no step is half taken; what was sent and what is left add up to what entered; who lost nothing keeps
its work; the loss ends where it does without faults. A failing seed always fails. It is shrunk to the fewest faults,
and told as a story: time, island, what happened.

    >>> from fn.testing.world import drawn, run
    >>> plan = drawn(3)
    >>> plan.islands, plan.ranks, plan.method, len(plan.events)
    (2, 2, 'DiLoCo in 8 bits', 4)
    >>> result = run(plan)
    >>> result.failure, result.counts
    ('', True)
"""

from fn.testing.world.plan import Event, Plan, drawn
from fn.testing.world.world import Result, run, shrunk

__all__ = ["Event", "Plan", "Result", "drawn", "run", "shrunk"]
