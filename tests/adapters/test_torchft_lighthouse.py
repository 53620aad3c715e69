"""The world's stand-in for torchft's lighthouse beside torchft's own: the same quorums of 100 sequences of events.

    python tests/adapters/test_torchft_lighthouse.py

records the sequences anew.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from lighthouse_sequences import FILE, SLOT, StandIn, Told, drawn, play, recorded

from fn.testing.world.quorum import HEARTBEAT, JOIN, TICK

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not installed: make torchft-test"),
]

SCALES = 5, 4, 3, 2, 1
"""How many times faster than the world's clock lighthouses are: the next one, where a machine is too busy."""

TOGETHER = 50
LIMIT = timedelta(minutes=5)
TURN = threading.Lock()


class Late(Exception):
    """This machine was too busy to play a sequence in time."""


class Torchft:
    """torchft's lighthouse. life: counts restarts. answers: when, in which life, number, members, and their steps."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        self.life, self.failures = 0, list[Exception]()
        self.answers = list[tuple[float, int, int, list[str], list[int] | None]]()
        self.restart()
        self.start, self.due = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds since the start, by the world's clock."""
        return (time.monotonic() - self.start) * self.scale

    def wait(self, until: float) -> None:
        """Sleep until a time. Raises: Late if what happened before, or this, was not in time."""
        self.be_in_time(self.due)
        time.sleep(max(0.0, (until - self.now()) / self.scale))
        self.be_in_time(until)
        self.due = until
        if self.failures:
            raise self.failures[0]

    def restart(self) -> None:
        """Begin anew: who waited for an answer gets none."""
        from torchft.coordination import LighthouseClient, LighthouseServer

        self.life, self.asking, self.managers = self.life + 1, set[str](), dict[str, Any]()
        self.server = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=int(JOIN * 1000 / self.scale),
            quorum_tick_ms=int(TICK * 1000 / self.scale), heartbeat_timeout_ms=int(HEARTBEAT * 1000 / self.scale),
        )  # fmt: skip
        self.client = LighthouseClient(self.server.address(), LIMIT)

    def heartbeat(self, name: str, last: bool) -> None:
        """Send one."""
        self.client.heartbeat(name, LIMIT)

    def waiting(self) -> set[str]:
        """Return which islands wait for an answer."""
        return self.asking

    def ask(self, name: str, step: int, failures: int) -> None:
        """Ask for a quorum."""
        self.asking.add(name)
        arguments = self.life, self.due, name, step, failures
        threading.Thread(target=self.hear, args=arguments, daemon=True).start()

    def hear(self, life: int, due: float, name: str, step: int, failures: int) -> None:
        """Wait for an answer."""
        try:
            answer = self.with_failures(due, name, step, failures) if failures else self.without(due, name, step)
        except Exception as error:
            if life == self.life:
                self.failures.append(error)
            return
        if life == self.life:
            self.answers.append((self.now(), life, *answer))
            self.asking.remove(name)

    def without(self, due: float, name: str, step: int) -> tuple[int, list[str], list[int]]:
        """Ask as an island without failures."""
        self.be_in_time(due)
        quorum = self.client.quorum(name, LIMIT, step=step)
        return quorum.quorum_id, [x.replica_id for x in quorum.participants], [x.step for x in quorum.participants]

    def with_failures(self, due: float, name: str, step: int, failures: int) -> tuple[int, list[str], None]:
        """Ask as an island with failures, of which only torchft's server for an island tells the lighthouse."""
        from torchft.coordination import ManagerClient, ManagerServer

        managers = self.managers
        managers[name] = ManagerServer(
            replica_id=name, lighthouse_addr=self.server.address(), hostname="localhost", bind="[::]:0",
            store_addr="", world_size=1, heartbeat_interval=timedelta(hours=1), connect_timeout=LIMIT,
            quorum_retries=0,
        )  # fmt: skip
        client = ManagerClient(managers[name].address(), LIMIT)
        self.be_in_time(due)
        quorum = client._quorum(
            group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, init_sync=True,
            commit_failures=failures, timeout=LIMIT,
        )  # fmt: skip
        managers.pop(name, None)
        return quorum.quorum_id, quorum.replica_ids, None

    def be_in_time(self, due: float) -> None:
        """Note whether it is later than a sequence allows."""
        if self.now() > due + SLOT / 8:
            self.failures.append(Late())

    def end(self) -> None:
        """Let go of everything: then whoever still waits does no longer."""
        self.life += 1
        del self.server, self.client
        self.managers.clear()

    def told(self) -> list[Told]:
        """Return the quorums. Each of a quorum's members has told of it."""
        found = dict[Any, list[int] | None]()
        for when, life, number, members, steps in sorted(self.answers, key=lambda answer: answer[0]):
            key = int(when / SLOT), life, number, (*members,)
            found[key] = steps or found.get(key)
        return [Told(slot, number, [*members], steps) for (slot, _, number, members), steps in found.items()]


def live(events: Sequence[str]) -> list[Told]:
    """Play a sequence to torchft's lighthouse, again where the machine was too busy."""
    for scale in SCALES:
        with TURN:
            time.sleep(0.01)  # all lighthouses are not to begin, and to end, at once
            lighthouse = Torchft(scale)
        try:
            return play(events, lighthouse)
        except Late:
            print(f"too busy to play {scale} times faster than the world's clock")
        finally:
            lighthouse.end()
    raise Late


def all_live(sequences: Sequence[list[str]]) -> list[list[Told]]:
    """Play sequences to as many lighthouses, many at once: they mostly wait."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        return [*pool.map(live, sequences)]


def test_the_stand_in_tells_the_quorums_that_torchfts_lighthouse_tells():
    sequences = recorded()
    told = all_live([events for events, _ in sequences])
    for (events, before), quorums in zip(sequences, told, strict=True):
        assert quorums == before, events
        assert quorums == play(events, StandIn()), events


if __name__ == "__main__":
    sequences = [drawn(seed) for seed in range(100)]
    lines = [json.dumps(pair) for pair in zip(sequences, all_live(sequences), strict=True)]
    version = importlib.metadata.version("torchft")
    FILE.write_text(f'{{"torchft": "{version}", "sequences": [\n' + ",\n".join(lines) + "\n]}\n")
