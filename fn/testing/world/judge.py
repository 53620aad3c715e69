"""What is held against the islands: it keeps its own books, and believes the adapter nothing that it can count itself."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Round, Transform
from fn.testing.world.quorum import MEETING, PATIENCE, Manager
from fn.testing.world.scheduler import Process

if TYPE_CHECKING:
    from fn.adapters.torchft.islands import Islands
    from fn.testing.world.world import World

QUICK, SLOW, LONG = 3.0, MEETING + 4 * PATIENCE, 100.0
"""Seconds that an exchange may take: from its quorum on while nothing happens, at any time, and with its quorum."""

FIRST = 5.0
"""Seconds of the first exchange of a process, which loads kernels."""


class Entry(NamedTuple):
    """What a rank gives into an exchange. apart: anchor - params. sent: that times its weight. owed: its errors before,
    as the judge knows them; left: behind it. units: steps or tokens since the last exchange. steps: the steps of it.
    """

    apart: Tensor
    sent: Tensor
    owed: Tensor
    units: float
    steps: int
    may_rest: bool
    left: list[Tensor]
    mean: list[Tensor]

    @property
    def speaks(self) -> bool:
        """Return whether the difference counted."""
        return bool(self.sent.any()) or not (self.apart.any() or self.may_rest)


class Books:
    """What the judge knows of a rank. owed: by fragment. steps: that no exchange has taken. full: its last exchanges.

    touched: whether a fault has hit its island in this life.
    """

    opt: Islands
    params: list[Tensor]
    agreed: list[Tensor]
    anchor = b""

    def begin(self, opt: Islands) -> None:
        """Take in an optimizer, whose state stays in its memory."""
        state = opt.units[0].state
        self.opt, self.params = opt, tree.leaves(opt.units[0].params)
        self.agreed = tree.leaves([roles.find(state, "copies")[0], tree.fields(state, "outer")])

    def __init__(self, process: Process, manager: Manager, factor: float):
        self.process, self.manager, self.factor = process, manager, factor
        self.owed, self.steps, self.looked, self.healed = dict[int, Tensor](), 0, 0, False
        self.entry: tuple[Any, int, Entry] | None = None
        self.begun = dict[int, tuple[Tensor, int]]()
        self.is_loading = self.has_exchanged = False
        self.uncounted = 0

    def count(self, *_: Any) -> None:
        """Note that a local step is taken now."""
        self.steps, self.uncounted = self.steps + 1, self.uncounted + 1


def flat(leaves: list[Tensor]) -> Tensor:
    """Return leaves as one vector of float64."""
    return torch.cat([x.detach().reshape(-1) for x in leaves]).double()  # (...) each -> (n,)


def bits(leaves: list[Tensor]) -> bytes:
    """Return the bits of leaves."""
    return b"".join(x.detach().numpy().tobytes() for x in leaves)


class Judge:
    """Who compares. exchanges: the serial numbers of those that were written. heals: how many islands were healed."""

    def __init__(self, world: World):
        self.world, self.exchanges, self.heals = world, set[int](), 0
        self.entries = dict[tuple[int, int], dict[Process, Entry]]()
        self.written, self.params = dict[int, dict[Process, bytes]](), dict[Any, dict[Process, bytes]]()
        self.checked = set[tuple[int, int]]()

    def watched(self, make: Callable[..., Transform], **given: Any) -> Transform:
        """Return a method whose exchanges are noted, and of which the first one of a process takes long."""
        tx = make(**given)
        exchange = tx.exchange
        assert exchange is not None

        def places(number: int, of: Any) -> list[Tensor]:
            leaves = tree.leaves(of)
            return leaves[number :: self.world.plan.fragments]

        def difference(number: int, state: Any, params: Any) -> Any:
            books = self.world.books[self.world.process]
            anchor = roles.find(state, "copies")[0]
            pairs = zip(places(number, anchor), places(number, params), strict=True)
            books.begun[number] = flat([x - p for x, p in pairs]), books.steps
            return exchange.difference(number, state, params)

        def mean(number: int, state: Any, params: Any) -> Any:
            books = self.world.books[self.world.process]
            if not books.has_exchanged:
                books.has_exchanged = True
                self.world.sleep(FIRST)
            if books.manager.quorum is None:  # with itself
                return exchange.mean(number, state, params)
            apart, steps = books.begun[number]
            sent = flat(places(number, roles.find(state, "difference")[0]))
            owed = books.owed.get(number, torch.zeros_like(apart))
            entry = Entry(
                apart, sent, owed, steps * books.factor, steps, not books.opt.joined or books.opt.now == Round(), [], []
            )
            key = books.manager.quorum.serial, books.process.rank
            self.entries.setdefault(key, {})[books.process] = entry
            books.entry = key, number, entry
            params, after = exchange.mean(number, state, params)
            entry.left.append(self.errors(after, number, len(apart)))
            entry.mean.append(flat(places(number, roles.find(after, "difference")[0])))
            return params, after

        return tx._replace(exchange=exchange._replace(difference=difference, mean=mean))

    def errors(self, state: Any, number: int, size: int) -> Tensor:
        """Return the residual errors of a fragment."""
        found = [x for x in tree.leaves(roles.find(state, "errors"))]
        mine = found[number : number + 1] if len(found) > 1 else found
        return flat(mine)[:size].clone() if mine else torch.zeros(size, dtype=torch.float64, device="cpu")

    def loaded(self, opt: Islands) -> None:
        """Note that a rank has become a copy of another, or of a checkpoint."""
        books = self.world.books[self.world.process]
        books.steps, books.healed = 0, not books.is_loading
        sizes = [
            len(flat(tree.leaves(roles.find(opt.units[0].state, "copies")[0])[f :: self.world.plan.fragments]))
            for f in range(self.world.plan.fragments)
        ]
        errors = [self.errors(opt.units[0].state, f, n) for f, n in enumerate(sizes)]
        books.owed = dict(enumerate(errors)) if books.is_loading else {}
        if books.healed:
            self.heals += books.process.rank == 0
            self.world.tell(books.process, "becomes a copy of another island")
            mine = {*self.world.islands[books.process.island]}
            if opt.joined and not self.world.is_touched(books.process) and not mine & self.world.network.unsure:
                self.world.end(f"{books.process} loses its work, although nothing has happened to it")

    def look(self, opt: Islands, began: float) -> None:
        """Judge what a step has left."""
        world, books = self.world, self.world.books[self.world.process]
        manager, process = books.manager, books.process
        told, books.looked = manager.told[books.looked :], len(manager.told)
        for found, ended, count, written, _ in told:
            quick = written and not world.is_disturbed(max(began, found) - 1.0, ended + 1.0)
            if ended - max(began, found) > (QUICK if quick else SLOW):
                world.end(f"{process} was in an exchange for {ended - max(began, found):.1f} s")
            if found - began > LONG:
                world.end(f"{process} waited {found - began:.1f} s for a quorum")
            world.tell(
                process, f"{'wrote' if written else 'dropped'} an exchange of {count} islands, number {manager.step}"
            )
        if opt.refused or not all(bool(p.isfinite().all()) for p in books.params):
            world.end(f"{process} has half a step: {opt.refused or 'numbers that are not finite'}")
        here = bits(books.agreed) if told or books.healed or not books.anchor else books.anchor
        written = [one.serial for one in told if one.written]
        if written:
            self.compare(self.written.setdefault(written[-1], {}), process, here, f"exchange {manager.step}")
            self.settle(books, written)
        elif here != books.anchor and books.anchor and not books.healed:
            world.end(f"{process} has another anchor, although it wrote no exchange")
        life = process.island, process.life, opt.steps, len(manager.told)
        self.compare(self.params.setdefault(life, {}), process, bits(books.params), f"step {opt.steps}")
        books.healed, books.anchor = False, here
        if told and not opt.flying:
            books.entry = None

    def compare(self, book: dict[Process, bytes], process: Process, here: bytes, what: str) -> None:
        """Hold the bits of a rank against those of others that live."""
        for other, theirs in book.items():
            if other.ended == inf and theirs != here:
                self.world.end(f"{process} and {other} differ behind {what}")
        book[process] = here

    def settle(self, books: Books, written: list[int]) -> None:
        """Add up an exchange that a rank has written: what was sent, what is left, what has entered."""
        if books.entry is None or books.entry[0][0] not in written:
            return
        key, number, entry = books.entry
        world, size = self.world, len(books.manager.quorum.members) if books.manager.quorum else 0
        self.exchanges.add(key[0])
        entries = [e for e in self.entries[key].values() if e.left]
        if key not in self.checked and len(entries) == size:
            self.checked.add(key)
            due = sum(e.sent + e.owed - e.left[0] for e in entries)
            got = size * entry.mean[0]
            if __import__("os").environ.get("DBG"):
                print(
                    number,
                    [
                        (e.sent[:4].tolist(), e.owed[:4].tolist(), e.left[0][:4].tolist(), e.mean[0][:4].tolist())
                        for e in entries
                    ],
                    due[:20],
                    got[:20],
                )
            scale = sum(float((e.sent.abs() + e.owed.abs()).max()) for e in entries)
            if float((due - got).abs().max()) > 1e-4 * scale + 1e-6:
                world.end(
                    f"exchange {books.manager.step}: {float((due - got).abs().max()):.2g} of what islands sent is lost or counts twice"
                )
            speak = [e for e in entries if e.speaks]
            total = sum(e.units for e in speak)
            for e in (e for e in speak if e.apart.any()):
                weight = float((e.sent @ e.apart) / (e.apart @ e.apart))
                wanted = size * e.units / total if total else 1.0
                if abs(weight - wanted) > 1e-3:
                    world.end(
                        f"exchange {books.manager.step}: a difference of {e.units:.0f} counts {weight:.3f} times, and not {wanted:.3f}"
                    )
            if any(not (e.may_rest or e.speaks) for e in entries):
                world.end(f"exchange {books.manager.step}: an island was there, and its difference did not count")
        books.owed[number] = entry.left[0]
        if entry.speaks:
            books.steps -= entry.steps
