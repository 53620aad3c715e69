"""What is held against the islands: the judge keeps its own books, and believes nothing that it can count itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Phase, Round, Transform
from fn.testing.world.plan import Plan
from fn.testing.world.quorum import MEETING, PATIENCE, Manager
from fn.testing.world.scheduler import Process, Scheduler
from fn.transforms.outer import OuterState

QUICK, SLOW, LONG = 3.0, MEETING + 4 * PATIENCE, 100.0
"""Seconds that an exchange may take from its quorum on, while nothing happens and at any time, and a quorum itself."""

FIRST = 5.0
"""Seconds of the first exchange of a process, which loads kernels."""


class Entry(NamedTuple):
    """What a rank gives into an exchange.

    apart: anchor - params, of so many steps since its last exchange. tokens: for which it speaks. may_rest: whether
    that need not count. owed: its errors before, as the judge knows them. sent: the difference times its weight.
    after: the mean, and its errors then.
    """

    fragment: int
    apart: Tensor
    steps: int
    tokens: float
    may_rest: bool
    owed: Tensor
    sent: Tensor
    after: list[Tensor]

    @property
    def speaks(self) -> bool:
        """Return whether the difference counted."""
        return bool(self.sent.any()) or not (self.apart.any() or self.may_rest)


class Books:
    """What the judge knows of a rank.

    owed: its errors, by fragment. steps, tokens: that no exchange has taken; tokens are those of which the adapter was
    told. synced: when it wrote an exchange of all islands. looked: how many exchanges are judged. copied: how many
    there were when it became a copy of another island.
    """

    def __init__(self, process: Process, manager: Manager, opt: Any):
        self.process, self.manager, self.opt = process, manager, opt
        state = opt.units[0].state
        self.params = tree.leaves(opt.units[0].params)
        # They stay in their memory.
        self.agreed = tree.leaves([(of.anchor, of.outer) for of in tree.instances(state, OuterState)])
        self.owed, self.begun = dict[int, Tensor](), dict[int, tuple[Tensor, int]]()
        self.steps, self.tokens, self.looked, self.copied, self.synced = 0, 0.0, 0, 0, -inf
        self.serial, self.here, self.healed = -1, bits(self.agreed), False
        self.entry: Entry | None = None
        opt.register_step_pre_hook(self.count)  # behind the adapter's, which may heal

    def count(self, *_: Any) -> None:
        """Note that a local step is taken now."""
        self.steps += 1


def flat(leaves: list[Tensor]) -> Tensor:
    """Return leaves as one vector of float64."""
    return torch.cat([x.detach().reshape(-1) for x in leaves]).double()  # (...) each -> (n,)


def bits(leaves: list[Tensor]) -> bytes:
    """Return the bits of leaves."""
    return b"".join(x.detach().numpy().tobytes() for x in leaves)


class Judge:
    """Who compares. exchanges: the serial numbers of those that were written. heals: how many islands were healed.

    books: of each rank that lives. warm: processes that have had their first exchange. touched: island -> until when
    something has happened to it that may cost it its work. disturbed: when something happened.
    """

    def __init__(self, world: Scheduler, plan: Plan, unsure: set[Process]):
        self.world, self.plan, self.unsure = world, plan, unsure
        self.exchanges, self.heals, self.warm = set[int](), 0, set[Process]()
        self.books, self.touched = dict[Process, Books](), defaultdict[int, float](float)
        self.disturbed = list[tuple[float, float]]()
        self.entries = defaultdict[tuple[int, int], dict[Process, Entry]](dict)
        self.seen = defaultdict[Any, dict[Process, bytes]](dict)

    def check(self, is_right: bool, wrong: str) -> None:
        """End the run where something is wrong."""
        if not is_right:
            self.world.end(wrong)

    def watched(self, make: Callable[..., Transform], **given: Any) -> Transform:
        """Return a method whose exchanges are noted; the first one of a process takes long."""
        tx = make(**given)
        exchange: Any = tx.exchange

        def part(number: int, of: Any) -> list[Tensor]:
            return tree.leaves(of)[number :: self.plan.fragments]

        def difference(number: int, state: Any, params: Any) -> Any:
            books = self.books.get(self.world.here.process)
            if books is not None:
                pairs = zip(part(number, roles.find(state, "copies")[0]), part(number, params), strict=True)
                books.begun[number] = flat([x - p for x, p in pairs]), books.steps
            return exchange.difference(number, state, params)

        def mean(number: int, state: Any, params: Any) -> Any:
            process = self.world.here.process
            if process not in self.warm:
                self.warm.add(process)
                self.world.sleep(FIRST)
            books = self.books.get(process)
            if books is None:  # an exchange with itself
                return exchange.mean(number, state, params)
            (apart, steps), sent = books.begun[number], flat(part(number, roles.find(state, "difference")[0]))
            may_rest = not books.opt.joined or books.opt.now == Round()
            owed = books.owed.get(number, torch.zeros_like(apart))
            tokens = books.tokens if self.plan.counts_tokens else float(steps)
            books.entry = entry = Entry(number, apart, steps, tokens, may_rest, owed, sent, [])
            books.serial = books.manager.present.serial
            self.entries[books.serial, process.rank][process] = entry
            params, after = exchange.mean(number, state, params)
            entry.after[:] = flat(part(number, roles.find(after, "difference")[0])), self.errors(after, number, apart)
            return params, after

        return tx._replace(exchange=exchange._replace(difference=difference, mean=mean))

    def errors(self, state: Any, number: int, like: Tensor) -> Tensor:
        """Return the residual errors of a fragment, a vector like another one."""
        found = tree.leaves(roles.find(state, "errors"))[number : number + 1]
        return flat(found)[: len(like)] if found else torch.zeros_like(like)

    def loaded(self, books: Books, *, is_copy: bool) -> None:
        """Note that a rank has become a copy of another island, or goes on from a checkpoint."""
        process, state, parts = books.process, books.opt.units[0].state, self.plan.fragments
        books.steps, books.tokens, books.healed = 0, 0.0, is_copy
        owed = {f: self.errors(state, f, flat(books.params[f::parts])) for f in range(parts)}
        books.owed = {} if is_copy else owed
        if is_copy:
            books.copied = len(books.manager.told)
            self.heals += process.rank == 0
            self.world.tell(process, "becomes a copy of another island")
            is_unsure = any(p.island == process.island and p.born == process.born for p in self.unsure)
            lost = self.touched[process.island] <= books.synced and not is_unsure
            self.check(not lost, f"{process} loses its work, although nothing has happened to it")

    def look(self, books: Books, began: float) -> None:
        """Judge what a step has left."""
        manager, process, opt = books.manager, books.process, books.opt
        told, is_here = manager.told[books.looked :], manager.told[max(books.looked, books.copied) :]
        books.looked = len(manager.told)
        for found, ended, count, written, _ in told:
            since, what = max(began, found), "wrote" if written else "dropped"
            quick = written and not any(a < ended + 1 and since - 1 < b for a, b in self.disturbed)
            self.check(ended - since <= (QUICK if quick else SLOW), f"{process}: {ended - since:.1f} s in an exchange")
            self.check(found - began <= LONG, f"{process} waited {found - began:.1f} s for a quorum")
            books.synced = ended if written and count == self.plan.islands else books.synced
            self.world.tell(process, f"{what} an exchange of {count} islands, number {manager.step}")
        whole = not opt.refused and all(bool(p.isfinite().all()) for p in books.params)
        self.check(whole, f"{process} has half a step, or numbers that are not finite: {opt.refused}")
        before, books.here = books.here, bits(books.agreed) if told or books.healed else books.here
        serials = [serial for *_, written, serial in is_here if written]
        if serials:
            self.compare(serials[-1], books, books.here, f"exchange {manager.step}")
        else:
            self.check(books.here == before or books.healed, f"{process} has moved its anchor and wrote no exchange")
        if books.entry is not None and books.serial in serials:
            self.settle(books, books.entry)
        if opt.now is Phase.WARMUP:  # whose steps are everybody's
            books.steps, books.tokens = 0, 0.0
        life = process.island, process.born, opt.steps, books.looked
        self.compare(life, books, bits(books.params), f"step {opt.steps}")
        books.healed, books.entry = False, books.entry if opt.flying else None

    def compare(self, key: Any, books: Books, here: bytes, what: str) -> None:
        """Hold the bits of a rank against those of others that live."""
        differ = [other for other, theirs in self.seen[key].items() if other.ended == inf and theirs != here]
        self.check(not differ, f"behind {what} {books.process} has other bits than {', '.join(map(str, differ))}")
        self.seen[key][books.process] = here

    def settle(self, books: Books, mine: Entry) -> None:
        """Add up an exchange that a rank has written: what was sent, what is left, what has entered."""
        of_all, what = self.entries[books.serial, books.process.rank], f"exchange {books.manager.step}"
        entries, size = list(of_all.values()), books.manager.num_participants()
        if books.serial not in self.exchanges and len(entries) == size and all(e.after for e in entries):
            apart = torch.stack([e.sent + e.owed - e.after[1] for e in entries]).sum(0) - size * mine.after[0]
            lost, scale = float(apart.abs().max()), sum(float((e.sent.abs() + e.owed.abs()).max()) for e in entries)
            self.check(lost <= 1e-4 * scale + 1e-6, f"{what}: {lost:.2g} of what was sent is lost or counts twice")
            units = [e.tokens * e.speaks for e in entries]
            for e, of in zip(entries, units, strict=True):
                self.check(e.speaks or e.may_rest, f"{what}: an island was there, and its difference did not count")
                if e.speaks and e.apart.any():
                    weight, due = float(e.sent @ e.apart / (e.apart @ e.apart)), size * of / sum(units)
                    text = f"{what}: the difference of {e.steps} steps counts {weight:.3f} times, and not {due:.3f}"
                    self.check(abs(weight - due) < 1e-3, text)
        self.exchanges.add(books.serial)
        books.steps, books.owed[mine.fragment] = books.steps - mine.steps * mine.speaks, mine.after[1]
        books.tokens -= mine.tokens * mine.speaks
