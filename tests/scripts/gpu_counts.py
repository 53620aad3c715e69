"""Count what steady steps of `fn.Optimizer` cost on a GPU, without one: launches, host waits, collectives, memory.

The model is a GPT of 1.3 billion parameters in 292 tensors, on one rank of 8, or of 4 nodes with 8 ranks each. Its
tensors are torch's fake ones, as in `other_device`: they have a device and a size, and no numbers; what the host reads
of them is made up. A function of a list is as many launches as CUDA makes of it, a kernel of Triton's is one. Every
read by the host waits for what was queued on the device; so does a copy to it from memory that is not pinned.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import gpu_table
from other_device import NAME, echo

import fn
from fn.adapters.ddp import overlapped
from fn.adapters.ddp.buckets import bucketed
from fn.adapters.optim.hooks import agree
from fn.collectives import agreement, primitives
from fn.collectives import owners as collectives_owners
from fn.collectives.carriers import Carrier
from fn.inplace import outer as in_place_outer
from fn.inplace import sharded as sharded_in_place
from fn.inplace import zero_one_adam
from fn.kernels import foreach, known_answers, reference, tracing
from fn.kernels.gpu import triton
from fn.kernels.gpu.triton import blocks, ints, lamb, lists, signs, steps
from fn.kernels.table import direct
from fn.transforms import average, low_rank, owned, sharded, unsharded
from fn.transforms.unsharded import Boxes

_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
WIDTH, LAYERS, WORDS, CONTEXT = 2048, 24, 50257, 2048
GROUPS = 2
FIRST = 100
"""The step from which on steps are taken."""
HOME = str(Path(fn.__file__).parent)

TENSORS_OF_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # lists that a function reads and writes -> tensors
BLOCK, BLOCKS_OF_A_LAUNCH = 1 << 16, 320
PARTS_OF_A_LAUNCH = 128  # of a concatenation
OF_A_LIBRARY = {"aten::linalg_cholesky_ex": 4, "aten::linalg_solve_triangular": 4, "aten::linalg_qr": 4}
"""Launches of functions that call cuSOLVER or cuBLAS, as torch's source has them, the library's own counted as one: the
copies that it works on, the addresses of a batch, the zeros above the diagonal. QR goes matrix by matrix."""


class Limits(NamedTuple):
    """The most of each: launches, waits of the host, collectives; new bytes per parameter at the peak."""

    launches: int
    waits: int
    collectives: int
    bytes: float


class Case(NamedTuple):
    """A step that is counted. axes: names. dtype: of params and gradients. kind: "watched" by a schedule that looks at
    the second moment, "overlapped" with a backward pass, "clipped" to a norm, "scaled" by a GradScaler, "layer by
    layer" in param groups, or "". groups: of params, where it is not; as many of each collective.
    """

    name: str
    make: Any
    phase: fn.Phase | fn.Round
    limits: Limits
    hyper: dict[str, Any] = {}  # noqa: RUF012
    axes: tuple[str, ...] = ("data",)
    dtype: torch.dtype = torch.float32
    kind: str = ""
    groups: int = GROUPS

    def __str__(self) -> str:
        when = PARTS_OF_A_ROUND[self.phase] if isinstance(self.phase, fn.Round) else self.phase.value
        parts = [self.name, when, *(f"{k}={v}" for k, v in self.hyper.items())]
        halves = {torch.bfloat16: ["bf16"], torch.float16: ["fp16"]}
        parts += ["two axes"] * (len(self.axes) > 1) + halves.get(self.dtype, []) + ["one group"] * (self.groups == 1)
        return ", ".join([*parts, *[self.kind] * bool(self.kind)])


def on_shards(lr: float, axis: str, codec: fn.Codec | None = None) -> fn.Transform:
    """Return Muon of params that are rows of whole tensors."""
    return fn.muon(lr, shards=axis, codec=codec)


def on_mesh(lr: float, axis: str) -> fn.Transform:
    """Return Muon of params that are a corner of whole tensors, cut in 2 by rows and in 4 by columns; or in 8."""
    dims, whole = list[int | Boxes](), list[tuple[int, ...]]()
    for shape in shapes():
        grid = (2, 4) if len(shape) == 2 else (8,)
        starts = tuple(tuple(n * k for n, k in zip(shape, at, strict=True)) for at in product(*map(range, grid)))
        dims.append(Boxes(starts, (shape,) * 8) if len(shape) == 2 else 0)
        whole.append(tuple(n * k for n, k in zip(shape, grid, strict=True)))
    return fn.muon(lr, shards=fn.Shards(axis, tuple(whole), tuple(dims)))


LOCAL_STEP, EXCHANGE = fn.Round(), fn.Round(0, 0)
PARTS_OF_A_ROUND = {LOCAL_STEP: "local step", EXCHANGE: "exchange"}
BOTH = ("local", "node")
W, C, L = fn.Phase.WARMUP, fn.Phase.COMPRESSED, fn.Phase.LOCAL
BF16, FP16 = torch.bfloat16, torch.float16
INT8 = {"codec": fn.int8()}
CASES = [  # two param groups; so two of each collective
    Case("adamw", fn.adamw, W, Limits(100, 1, 2, 4)),
    Case("adamw", fn.adamw, W, Limits(40, 1, 1, 8), kind="clipped"),
    Case("adamw", fn.adamw, W, Limits(40, 1, 2, 8), kind="scaled"),
    Case("lamb", fn.lamb, W, Limits(850, 1, 2, 5.8)),
    Case("1-bit Adam", fn.onebit_adam, W, Limits(100, 1, 2, 4)),
    Case("1-bit Adam", fn.onebit_adam, W, Limits(200, 2, 2, 4), kind="watched"),
    Case("1-bit Adam", fn.onebit_adam, C, Limits(200, 1, 4, 5)),
    Case("1-bit Adam", fn.onebit_adam, C, Limits(700, 1, 40, 5), kind="overlapped"),
    Case("1-bit Adam", fn.onebit_adam, W, Limits(100, 1, 6, 9), axes=BOTH),
    Case("1-bit Adam", fn.onebit_adam, C, Limits(300, 1, 24, 1.5), axes=BOTH),
    Case("1-bit Adam", fn.onebit_adam, W, Limits(100, 1, 2, 4), dtype=BF16),
    Case("1-bit Adam", fn.onebit_adam, C, Limits(250, 1, 4, 5), dtype=BF16),
    Case("1-bit Adam", fn.onebit_adam, W, Limits(100, 1, 2, 4), dtype=FP16),
    Case("1-bit Adam", fn.onebit_adam, C, Limits(250, 1, 4, 5), dtype=FP16),
    Case("1-bit LAMB", fn.onebit_lamb, W, Limits(250, 1, 2, 8.2)),
    Case("1-bit LAMB", fn.onebit_lamb, C, Limits(250, 1, 4, 9)),
    Case("0/1 Adam", fn.zero_one_adam, W, Limits(150, 1, 2, 4)),
    Case("0/1 Adam", fn.zero_one_adam, C, Limits(250, 1, 4, 5)),
    Case("0/1 Adam", fn.zero_one_adam, L, Limits(100, 1, 0, 1)),
    # `check_agreement` of shards asks for kernels and would empty their table here: the counts were of other steps.
    Case("LoCo", fn.loco_adamw, W, Limits(100, 1, 4, 8.1)),
    Case("LoCo", fn.loco_adamw, C, Limits(130, 1, 4, 7.2)),
    Case("1-bit shards", fn.sharded_onebit_adam, W, Limits(130, 1, 6, 10.1)),
    Case("1-bit shards", fn.sharded_onebit_adam, C, Limits(160, 1, 6, 13.6)),
    # What follows goes tensor by tensor today: the limits are what is counted, so that they are noticed if they grow.
    Case("diloco", fn.diloco, LOCAL_STEP, Limits(50, 1, 0, 1)),
    Case("diloco", fn.diloco, EXCHANGE, Limits(500, 2, 5, 12.5)),
    Case("local_sgd", fn.local_sgd, LOCAL_STEP, Limits(200, 1, 0, 1.1)),
    Case("local_sgd", fn.local_sgd, EXCHANGE, Limits(500, 2, 5, 12.5)),
    Case("muloco", fn.muloco, LOCAL_STEP, Limits(640, 1, 0, 1.5)),
    Case("muloco", fn.muloco, EXCHANGE, Limits(1500, 2, 5, 12.5)),
    Case("sparse_loco", fn.sparse_loco, LOCAL_STEP, Limits(50, 1, 0, 1)),
    Case("sparse_loco", fn.sparse_loco, EXCHANGE, Limits(2450, 2, 6, 23.1)),
    Case("powersgd_adamw", fn.powersgd_adamw, C, Limits(300, 1, 2, 8.1), groups=1),
    Case("dion", fn.dion, C, Limits(600, 1, 2, 12), groups=1),
    Case("muon", fn.muon, W, Limits(220, 1, 2, 5.5), groups=1),
    Case("muon in int8", partial(fn.muon, **INT8), C, Limits(270, 1, 2, 11.4), groups=1),
    Case("muon, replicated", partial(fn.muon, owned=False), W, Limits(600, 1, 1, 5.7), groups=1),
    Case("muon behind DDP", lambda lr, axis: fn.muon(lr), W, Limits(600, 1, 0, 1.7), groups=1),
    # Matrices that 8 ranks share, together and layer by layer, as they would leave behind a backward pass.
    Case("muon on shards", on_shards, W, Limits(360, 1, 3, 23.6), groups=1),
    Case("muon in int8 on shards", partial(on_shards, **INT8), C, Limits(930, 1, 3, 37), groups=1),
    Case("muon on a mesh of 2 x 4", on_mesh, W, Limits(570, 1, 3, 29.8), groups=1),
    Case("muon on shards", on_shards, W, Limits(1600, 3, 79, 20.1), kind="layer by layer"),
    Case("sign_muon", fn.sign_muon, C, Limits(600, 1, 4, 17.1), groups=1),
    Case("lion_vote", fn.lion_vote, C, Limits(210, 1, 4, 20)),
]


def place() -> str:
    """Return the line of this library that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and HOME not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(HOME)}:{frame.f_lineno}" if frame else "?"


def tensors_of(*args: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]


def launches_of(name: str, args: Any) -> int:
    """Return how many kernels CUDA launches for an op."""
    if name == "aten::cat":
        return -(-len(args[0]) // PARTS_OF_A_LAUNCH)
    if name == "aten::split_with_sizes_copy":
        return 2  # one for all parts, and the copy of their addresses from pinned memory
    if name in OF_A_LIBRARY:
        return OF_A_LIBRARY[name] * (len(args[0].flatten(0, -3)) if "qr" in name else 1)
    if name == "aten::_unsafe_view":  # no view to autograd, but one to the device
        return 0
    if "_foreach_" not in name and "_fused_" not in name:
        return 1
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if not lists or not lists[0]:
        return 0
    if "_foreach_norm" in name:
        return 2 * count_of(lists[0], TENSORS_OF_A_LAUNCH[1])
    alike = all(len({(t.stride(), t.dtype) for t in row}) == 1 and is_dense(row[0]) for row in zip(*lists, strict=True))
    if not alike:
        return len(lists[0])
    deep = len(lists) + (not name.endswith("_"))  # results are a list, too
    return count_of(lists[0], TENSORS_OF_A_LAUNCH[min(deep, 5)])


def count_of(tensors: Any, most: int) -> int:
    """Return how many launches a list is cut into."""
    launches, here, blocks = 1, 0, 0
    for t in tensors:
        here, blocks = here + 1, blocks + -(-t.numel() // BLOCK)
        launches += blocks // BLOCKS_OF_A_LAUNCH + (here > most)
        here, blocks = (1 if here > most else here), blocks % BLOCKS_OF_A_LAUNCH
    return launches


def is_dense(t: Tensor) -> bool:
    """Return whether elements lie without gaps."""
    order = sorted(range(t.dim()), key=t.stride)
    return t.permute(order[::-1]).is_contiguous()


class Watch(TorchDispatchMode):
    """Count reads, copies and launches by where they come from, and bytes that are alive on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.launches: collections.Counter[str] = collections.Counter()
        self.collectives = self.live = self.peak = 0
        self.peak_at = ""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name.startswith("fn::") and name[4:] in reference.REFERENCES:
            with self:
                return direct(name[4:], *args)
        tensors = tensors_of(args, kwargs)
        if name == "aten::_local_scalar_dense":
            return self.read(func, args[0])
        if name == "fn::carry":
            self.collectives += 1
            self.launches["collective"] += 1
        if name in ("aten::_to_copy", "aten::copy_"):
            to = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or args[0].device)
            if to.type != args[-1].device.type and not kwargs.get("non_blocking"):
                self.waits[place()] += 1
        for x in tensors:
            self.known(x)
        if name == "aten::_to_copy" and kwargs.get("device") == DEVICE and not isinstance(args[0], FakeTensor):
            found = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=DEVICE)  # no numbers
        else:
            found = func(*args, **kwargs)
        there = any(x.device == DEVICE for x in [*tensors, *tensors_of(found)])
        if there and name.startswith("aten::") and not func.is_view and "empty" not in name:
            self.launches[f"{name[6:]} {place()}"] += launches_of(name, args)
        for x in tensors_of(found):
            if x.device == DEVICE:
                self.count(x)
        return found

    def known(self, x: Tensor) -> None:
        """Take note of what was there before; its place may be another's when it is gone."""
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._known.discard, storage._cdata)

    def count(self, x: Tensor) -> None:
        """Count a storage until it ends."""
        storage = x.untyped_storage()
        if storage._cdata in self._known:
            return
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_at = self.live, place()
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def read(self, func: Any, x: Any) -> Any:
        if x.device == DEVICE:
            self.waits[place()] += 1
        elif not isinstance(x, FakeTensor) or x.constant is not None:
            with _disable_current_modes():
                return func(x.constant if isinstance(x, FakeTensor) else x)
        return True if x.dtype == torch.bool else 0.5 if x.is_floating_point() else 1


watches: list[Watch] = []


def carry_sum(x: Tensor, transport: str) -> Tensor:
    """Count an all-reduce in place."""
    for watch in watches:
        watch.collectives += 1
        watch.launches["collective"] += 1
    return x


def pass_parts(sends: Any, receives: Any, axis: str, collective: str) -> None:
    """Count what is sent between tensors where they lie."""
    for watch in watches:
        watch.collectives += 1
        watch.launches["collective"] += 1


def pretend() -> None:
    """Let fake tensors pass for real ones, with the rows of Triton and torch; a kernel of Triton's is one launch."""

    def launch(kernel: Any, x: Any, programs: int, *args: Any, **constants: Any) -> None:
        for watch in watches:
            rule = constants.get("RULE")
            watch.launches[f"{kernel.__name__} {rule.__name__}" if rule else getattr(kernel, "__name__", "kernel")] += 1

    for module in (blocks, signs, ints, steps, lamb, lists):
        vars(module)["launch"] = launch
    vars(known_answers)["complaint"] = lambda op, kernel, device: None  # there are no numbers to compare
    for row in (foreach.row(NAME), triton.row(NAME)):  # the last one is asked first
        fn.kernels.register(row)
    tracing._PLAIN.add(FakeTensor)
    vars(primitives)["carry_sum"] = carry_sum
    vars(primitives)["pass_parts"] = pass_parts
    vars(collectives_owners)["carrier_of"] = lambda transport, tensors: Carrier(transport, sends_parts=True)
    vars(overlapped).update(Threads=Now, gather_values=lambda value, axis, device: [value])
    vars(tracing)["runs_as_written"] = lambda: True  # plans are kept, as without this watch
    for module, check in ((agreement, "check_calls"), (agreement, "check_agreement"), (agree, "check_start"),
                          (agree, "check_listed"), (agree, "check_accepted"),
                          (average, "check_agreement"), (low_rank, "check_agreement"),
                          (owned, "check_agreement"), (unsharded, "check_agreement"),
                          (sharded, "check_agreement"), (sharded, "check_shards"),
                          (sharded_in_place, "check_shards")):  # fmt: skip
        vars(module)[check] = lambda *args, **kwargs: None
    # Counts of a state are numbers, too, which read as 0.5 here.
    vars(zero_one_adam)["check_synchronised"] = vars(in_place_outer)["check_alike"] = lambda count: None
    made = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        with _disable_current_modes():  # what the host makes it can read
            found = made(data, dtype=dtype)
        if device is None or torch.device(device).type != NAME:
            return found
        for watch in watches:
            watch.waits[place()] += 1
        return torch.empty(found.shape, dtype=found.dtype, device=device)

    torch.tensor = tensor


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the model's tensors."""
    w = WIDTH
    layer = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,), (4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(WORDS, w), (CONTEXT, w), *layer * LAYERS, (w,), (w,)]


def layers(params: list[Any]) -> list[list[Any]]:
    """Return the embeddings, the tensors of each layer, and what stands behind the last one."""
    each = len(params[2:-2]) // LAYERS
    return [params[:2], *(params[i : i + each] for i in range(2, len(params) - 2, each)), params[-2:]]


def steady(case: Case) -> tuple[Watch, float]:
    """Return what the third step costs, and its new bytes per parameter.

    An exchange stands behind a step that is local only, as nearly all do: that one has looked at the new params.
    """
    phases = [case.phase, LOCAL_STEP if case.phase == EXCHANGE else case.phase, case.phase]
    params = [torch.nn.Parameter(torch.empty(shape, dtype=case.dtype, device=DEVICE)) for shape in shapes()]
    groups = [{"params": params[g :: case.groups]} for g in range(case.groups)]
    groups = bucketed(params) if case.kind == "overlapped" else groups
    groups = [{"params": layer} for layer in layers(params)] if case.kind == "layer by layer" else groups
    axis: Any = case.axes if len(case.axes) > 1 else case.axes[0]
    schedule = fn.freeze_when_stable(0.9) if case.kind == "watched" else lambda step: phases[(step - FIRST) % 3]
    with Watch():
        opt = fn.Optimizer(groups, partial(case.make, axis=axis, **case.hyper), lr=1e-3, refuse_averaged=False,
                           max_norm=1.0 if case.kind == "clipped" else None, schedule=schedule)  # fmt: skip
    opt.steps = FIRST
    for p in params:
        p.grad = torch.empty_like(p)
    if case.kind == "scaled":
        opt.grad_scale, opt.found_inf = (torch.empty((), device=DEVICE) for _ in range(2))
    running = overlap(opt, params) if case.kind == "overlapped" else None
    for _ in range(3):
        with Watch() as watch:
            watches[:] = [watch]
            if running is not None:
                backward(running, params)
            opt.step()
            assert running is None or case.phase in running.bytes, "the step was not taken ahead"
    watches.clear()
    return watch, watch.peak / sum(p.numel() for p in params)


class Now:
    """In the place of `backward_pass.Threads`: jobs run when they are submitted, here, where they are watched."""

    def __init__(self, bindings: Any, device: Any) -> None:
        self._binding = bindings[0]

    def __len__(self) -> int:
        return 1

    def submit(self, turn: int, job: Any) -> Future[Any]:
        done: Future[Any] = Future()
        with self._binding, torch.no_grad():
            done.set_result(job())
        return done

    def raising_peer_lost(self) -> Any:
        return nullcontext()

    def falling_silent(self) -> Any:
        return nullcontext()

    def catch_up(self) -> None:
        """There is one stream only."""


def overlap(opt: fn.Optimizer, params: list[Any]) -> overlapped.Overlap:
    """Let steps be taken as `fn.adapters.ddp.overlap` does, but for its threads and hooks."""
    with Watch():
        running = overlapped.Overlap(params, opt, [opt.binding], None, 1.0, 0.0)
    opt.ahead = running.ahead
    return running


def backward(running: overlapped.Overlap, params: list[Any]) -> None:
    """Let gradients arrive as a backward pass makes them: the last one first."""
    begun = running.begin()
    for p in reversed(params):
        begun.arrive([p], [p.grad])
    begun.end()
    running.on_end()


def count(place: int) -> tuple[Limits, dict[str, Any], list[tuple[str, int]]]:
    """Return what a case costs, and where it waits, has its peak, and launches. Args: place: among `CASES`."""
    case = CASES[place]
    with echo(*case.axes, size=8), FakeTensorMode(allow_non_fake_inputs=True):
        watch, new = steady(case)
    counted = Limits(watch.launches.total(), watch.waits.total(), watch.collectives, round(new, 2))
    return counted, {**watch.waits, "peak": watch.peak_at}, watch.launches.most_common(40)


def main() -> None:
    """Count all cases, or those whose name holds an argument, which are then shown by place."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("only", nargs="*", help="parts of names of cases")
    arguments.add_argument("--json", type=Path, help="write the counts here; docs/gpu_counts.json: docs/gpu.md, too")
    chosen = arguments.parse_args()
    pretend()
    wrong, found = 0, {}
    places = [i for i, case in enumerate(CASES) if not chosen.only or any(word in str(case) for word in chosen.only)]
    # A process for each: plans are kept, and the tensors in them are fake ones of the case that made them.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for place, (counted, waits, launches) in zip(places, pool.imap(count, places), strict=True):
            case = CASES[place]
            found[str(case)] = counted._asdict()
            ok = all(a <= b for a, b in zip(counted, case.limits, strict=True))
            wrong += not ok
            counts = (f"{v} of {m} {k}" for k, v, m in zip(Limits._fields, counted, case.limits, strict=True))
            print(f"{'ok   ' if ok else 'WRONG'} {case}: {', '.join(counts)}", flush=True)
            if chosen.only or not ok:
                print("      waits", waits)
            if chosen.only and chosen.json is None:
                for where, n in launches:
                    print("     ", n, where)
            if chosen.json is not None:  # after each, for all of them take minutes
                gpu_table.write(chosen.json, found, [*map(str, CASES)])
    if chosen.json is None and not chosen.only and [*json.loads(gpu_table.COUNTS.read_text())] != [*map(str, CASES)]:
        wrong += 1
        print("WRONG docs/gpu_counts.json: other cases; write it anew with --json")
    print(f"{wrong} cost more than they may")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
