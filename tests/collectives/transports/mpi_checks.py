"""Checks that every rank of an `mpiexec` runs; rank 0 prints what came of each, as JSON. See `test_mpi.py`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepspeed_replay import KINDS, replay
from golden_cases import load_cases
from mpi4py import MPI

import fn
from fn import tree
from fn.collectives.agreement import check_agreement

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
DTYPES = (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def of_all_ranks(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the same (W, ...) small integers on every rank: row r is rank r's."""
    return torch.randint(0, 9, (SIZE, *shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_unbound() -> None:
    with pytest.raises(ValueError, match=rf"one of {SIZE} processes.*COMM_WORLD"):
        fn.axis_size("data")


def check_size_and_index() -> None:
    with fn.bind({"data": WORLD}):
        assert fn.axis_size("data") == SIZE
        assert fn.axis_index("data") == RANK


def check_exact_collectives() -> None:
    with fn.bind({"data": WORLD}):
        for dtype in DTYPES:
            for shape in ((), (3,), (2, 5), (0,)):
                x = of_all_ranks(*shape, dtype=dtype)
                rows = of_all_ranks(SIZE, *shape, dtype=dtype)
                assert torch.equal(fn.psum(x[RANK], "data"), x.sum(0, dtype=dtype)), (dtype, shape)
                assert torch.equal(fn.all_gather(x[RANK], "data"), x), (dtype, shape)
                assert torch.equal(fn.all_to_all(rows[RANK], "data"), rows[:, RANK]), (dtype, shape)


def check_narrow_sums_are_rounded_once() -> None:
    x = torch.full((SIZE, 1), 0.0, dtype=torch.bfloat16)
    x[0], x[1:] = 256.0, 1.0  # in bfloat16, 256 + 1 is 256
    with fn.bind({"data": WORLD}):
        assert torch.equal(fn.psum(x[RANK], "data"), x.float().sum(0).bfloat16())


def check_a_slice_is_sent_as_its_values() -> None:
    x = of_all_ranks(6, 4)
    with fn.bind({"data": WORLD}):
        assert torch.equal(fn.all_gather(x[RANK].T[1], "data"), x[:, :, 1])


def check_bool_is_refused() -> None:
    with fn.bind({"data": WORLD}), pytest.raises(TypeError, match=r"torch\.bool"):
        fn.psum(torch.ones(2, dtype=torch.bool), "data")


def rounds(tx: fn.Transform, sent: list[Tensor], state: object) -> tuple[list[Tensor], object]:
    found = []
    for x in sent:
        out, state = tx.compressed_update([x, x[:7].clone()], state, None)
        found.append(out)
    return found, state


def check_compressed_is_bitwise_the_simulation() -> None:
    generator = torch.Generator().manual_seed(1)
    sent = [torch.randn(SIZE, 1001, generator=generator) for _ in range(3)]
    codecs = {"sign": fn.sign(), "sign of blocks": fn.sign(block=64), "int4": fn.int4(block=64)}
    codecs |= {"int8": fn.int8(), "fp8": fn.fp8()}
    for name, codec in codecs.items():
        tx = fn.compressed_average("data", codec)

        def start_and_run(x: list[Tensor], tx: fn.Transform = tx) -> object:
            return rounds(tx, x, tx.init([x[0], x[0][:7].clone()]))

        simulated = fn.simulate(start_and_run, "data", SIZE)(sent)
        with fn.bind({"data": WORLD}):
            ours = start_and_run([x[RANK] for x in sent])
        for a, b in zip(tree.leaves(ours), tree.leaves(simulated), strict=True):
            assert torch.equal(a, b[RANK]), name


def check_two_axes() -> None:
    node, local = WORLD.Split(RANK // 2, RANK), WORLD.Split(RANK % 2, RANK)
    x = of_all_ranks(3)
    with fn.bind({"local": node, "node": local}):
        over_locals, over_nodes = fn.pmean(x[RANK], "local"), fn.pmean(x[RANK], "node")
    assert torch.equal(over_locals, x[RANK // 2 * 2 :][:2].mean(0))
    assert torch.equal(over_nodes, x[RANK % 2 :: 2].mean(0))


def check_mismatch_is_named() -> None:
    with fn.bind({"data": WORLD}):
        check_agreement("data", {"b1": 0.9})
        with pytest.raises(ValueError, match=r"b1 is 0\.8 on rank 2 and 0\.9 on rank 0"):
            fn.Optimizer([torch.zeros(3)], partial(fn.onebit_adam, axis="data", b1=0.8 if RANK == 2 else 0.9))


def check_ledger() -> None:
    x = of_all_ranks(4096)
    tx = fn.compressed_average("data", fn.sign())

    def count(x: Tensor) -> fn.Ledger:
        state = tx.init([x])  # the ranks compare what they mean here
        with fn.ledger() as sent:
            fn.pmean(tx.compressed_update([x], state, None)[0][0], "data")
        return sent

    found = []
    fn.simulate(lambda x: (found.append(count(x)), x)[1], "data", SIZE)(x)
    with fn.bind({"data": WORLD}):
        found.append(count(x[RANK]))
    simulated, ours = found
    assert ours.total > 0
    assert ours.sent == simulated.sent
    assert ours.messages == simulated.messages


def train(steps: int, **arguments: object) -> tuple[list[float], Tensor, fn.Optimizer]:
    """Fit a line, each rank from its own points, through both phases; return losses, parameters and optimizer."""
    torch.manual_seed(RANK)
    truth = torch.linspace(-1, 1, 20)
    p = torch.zeros(20, requires_grad=True)
    with fn.bind({"data": WORLD}):
        make = partial(fn.onebit_adam, axis="data")
        optimizer = fn.Optimizer([p], make, schedule=fn.freeze_after(10), lr=0.05, **arguments)
    losses = []
    for step in range(steps):
        x = torch.randn(32, 20)
        loss = ((x @ (p - truth)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 3 and RANK == 1:
            p.grad[0] = float("nan")
        optimizer.step()
        losses.append(loss.item())
    return losses, p.detach(), optimizer


def check_optimizer_trains() -> None:
    losses, p, optimizer = train(40)
    assert optimizer.phase is fn.Phase.COMPRESSED
    assert optimizer.skipped == 1
    assert losses[-1] < 0.2 * losses[0], losses
    with fn.bind({"data": WORLD}):
        assert all(torch.equal(row, p) for row in fn.all_gather(p, "data"))


def check_compiled() -> None:
    """On two ranks, because a graph takes each of them seconds."""
    two = WORLD.Split(RANK < 2, RANK)
    if RANK >= 2:
        return
    tx = fn.compressed_average("data", fn.sign())
    x = of_all_ranks(200)[RANK]
    with fn.bind({"data": two}):
        state = tx.init([x])

        def f(x: Tensor, state: object) -> object:
            return fn.pmean(x, "data"), tx.compressed_update([x * 2], state, None)

        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            pairs = zip(tree.leaves(compiled(x, state)), tree.leaves(f(x, state)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def check_deepspeeds_recordings() -> None:
    cases = [case for case in load_cases(*KINDS) if case.world == SIZE]
    assert cases
    for case in cases:
        replay(case, RANK, process_group=WORLD)


def check_freed() -> None:
    """MPICH gives the handle of a freed communicator to the next one, whose ranks are others here."""
    first = WORLD.Dup()
    handle, before = first.py2f(), fn.bind({"data": first})
    first.Free()
    second = WORLD.Split(RANK % 2, RANK)
    now = fn.bind({"data": second})
    with now:
        assert fn.psum(torch.ones(1), "data") == len(range(RANK % 2, SIZE, 2))
    if second.py2f() == handle:
        with before, pytest.raises(MPI.Exception):
            fn.psum(torch.ones(1), "data")
    second.Free()


def check_null_is_refused() -> None:
    with pytest.raises(ValueError, match="COMM_NULL"):
        fn.bind({"data": MPI.COMM_NULL})


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except BaseException:  # pytest's own failures are no Exception
        return traceback.format_exc()
    return None


def main() -> None:
    torch.set_num_threads(1)
    checks = [f for name, f in list(globals().items()) if name.startswith("check_") and f.__module__ == __name__]
    everyone = WORLD.gather({check.__name__: outcome(check) for check in checks})
    if RANK == 0:
        print(json.dumps({check.__name__: [found[check.__name__] for found in everyone] for check in checks}))


if __name__ == "__main__":
    main()
