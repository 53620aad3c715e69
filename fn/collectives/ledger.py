"""The ledger: how many bytes each rank puts on the wire, counted exactly, in both worlds.

Counted is what a rank must send to the others in the algorithm that moves least: (W - 1) / W of an all-to-all's
buffer, W - 1 times an all-gather's shard, 2 (W - 1) / W of an all-reduce's buffer. Of a permutation it is what goes to
another rank; simulated ranks and compiled graphs count it for a rank that keeps its value, too. Headers of the
transport are not counted, nor are the two numbers by which an exchange of a round, or a call that compares, says which
one it is. Of fractions of a byte, which an all-reduce of few elements can give, the ceiling is taken.
"""

from __future__ import annotations

from types import TracebackType

from fn.collectives.profiling import watch, watchers, writing


class Ledger:
    """Bytes that one rank sent, by (axis, collective). A context: it counts while it is entered.

    It counts what this thread sends, and what other threads send for it: what `fn.adapters.ddp` sends behind a backward
    pass, all of which is sent when the optimizer's step has returned. A backward pass on a device, which torch runs in
    a thread of its own, is counted for the main thread.

    sent: {(axis, collective): bytes}. messages: the same for the number of collectives.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[str, str], int] = {}
        self.messages: dict[tuple[str, str], int] = {}

    @property
    def total(self) -> int:
        """Return all bytes that the rank sent."""
        return sum(self.sent.values())

    def on(self, axis: str) -> int:
        """Return the bytes that the rank sent on one axis."""
        return sum(count for (name, _), count in self.sent.items() if name == axis)

    def __enter__(self) -> Ledger:
        watching = watchers()
        watch(watching._replace(ledgers=(*watching.ledgers, self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watching, books = watchers(), [*watchers().ledgers]
        del books[-1 - books[::-1].index(self)]  # another may have been entered since, or this one a second time
        watch(watching._replace(ledgers=tuple(books)))

    def __repr__(self) -> str:
        lines = [f"  {axis} {name}: {count:,} bytes" for (axis, name), count in self.sent.items()]
        return "\n".join([f"Ledger: {self.total:,} bytes per rank", *lines])


def ledger() -> Ledger:
    """Return a context that counts the bytes which this rank puts on the wire inside it.

    >>> import torch, fn
    >>> mean = fn.simulate(lambda x: fn.pmean(x, "data"), "data", 4, out_dims=None)
    >>> with fn.ledger() as sent:
    ...     _ = mean(torch.ones(4, 1000))
    >>> sent
    Ledger: 6,000 bytes per rank
      data all_reduce: 6,000 bytes
    """
    return Ledger()


def record(axis: str, collective: str, size: int) -> None:
    """Count one message of `size` bytes in every ledger that is open."""
    if books := watchers().ledgers:
        key = (axis, collective)
        # Threads may send for whoever opened a ledger: two that add at once would lose one of the counts.
        with writing:
            for book in books:
                book.sent[key] = book.sent.get(key, 0) + size
                book.messages[key] = book.messages.get(key, 0) + 1
