"""Gradients in codes inside FSDP2, on real gloo ranks. One function a rank does several checks: ranks are dear."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

import fn
from fn import tree
from fn.adapters.fsdp import Replicas, compress
from fn.transforms import flat_layout as layout

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Odd sizes, so that shards are uneven on any number of ranks, and a frozen parameter."""

    def __init__(self, width: int = 13):
        super().__init__()
        self.first = nn.Linear(9, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.last = nn.Linear(width, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x * self.frozen.sum())


def sharded(mesh=None, width: int = 13, **options) -> Net:
    torch.manual_seed(0)
    model = Net(width)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def batches(count: int, seed: int = 1):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(count, 4, 9, generator=generator)


def train(model, data, accumulate: bool = False, opt=None):
    """Take a step after every batch, or after every two of which the first sends nothing; return the parameters."""
    opt = opt or torch.optim.AdamW(model.parameters(), lr=0.02)
    for i, x in enumerate(data):
        last = not accumulate or i % 2 == 1
        model.set_requires_gradient_sync(last)
        model(x).square().mean().backward()
        if last:
            opt.step()
            opt.zero_grad()
    return [whole(p) for p in model.parameters()]


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)


def messages(compressed, collective: str = "all_to_all") -> int:
    return sum(count for (_, kind), count in compressed.sent.messages.items() if kind == collective)


CASES = {
    "fp32": (MixedPrecisionPolicy(), False, True),
    "accumulated": (MixedPrecisionPolicy(), True, False),
    "half, accumulated": (HALF, True, True),
    "mixed": (MIXED, False, False),
    "mixed, accumulated": (MIXED, True, True),
    "fp16": (FP16, False, True),
}


def identity_on_a_rank():
    found = {}
    for name, (policy, accumulate, reshard) in CASES.items():
        options = {"mp_policy": policy, "reshard_after_forward": reshard}
        exact = train(sharded(**options), batches(4), accumulate)
        model = sharded(**options)
        compressed = compress(model, fn.identity(), fn.off(), gather=fn.identity())
        ours = train(model, batches(4), accumulate)
        found[name] = same(exact, ours), messages(compressed), messages(compressed, "all_gather")
    compressed.remove()
    train(model, batches(2))
    found["removed"] = messages(compressed)
    sums = []
    for install in (None, True):
        model = sharded()
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        if install:
            compress(model, fn.identity(), fn.off())
        sums.append(totals(model))
    found["sum"] = same(*(list(found.values()) for found in sums))
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(False)
            part.set_gradient_divide_factor(4.0)  # a pre-multiplied sum, which gloo itself does not have
    found["factor"] = same([x / 2 for x in sums[0].values()], list(totals(model).values()))
    return found


def test_with_the_identity_training_is_bitwise_what_it_is_without_us():
    for found in run(2, identity_on_a_rank):
        assert found["sum"]
        assert found["factor"]
        for name, (_, accumulate, reshard) in CASES.items():
            equal, reduced, gathered = found[name]
            assert equal, name
            assert reduced == 3 * (2 if accumulate else 4)  # three groups; nothing is sent while gradients gather
            assert gathered >= (2 * 4 * 2 if reshard else 2 * 4)
        assert found["removed"] == found["fp16"][1]  # FSDP2's own communication is back


def local(x: DTensor) -> torch.Tensor:
    return x.to_local().detach().clone()


def totals(model, part=whole) -> dict[str, torch.Tensor]:
    """Let the parameters rest; return the sum of the gradients of five batches."""
    found: dict[str, torch.Tensor] = {}
    for x in batches(5):
        model(x).square().mean().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                found[name] = found.get(name, 0) + part(p.grad)
                p.grad = None
    return found


CODECS = {"int4": partial(fn.int4, 8), "sign": fn.sign, "int8": partial(fn.int8, 16), "fp8": partial(fn.fp8, 16)}


def without_rank(state):
    return {path.partition(".")[2]: x for path, x in state.items()}


def delivered_on_a_rank():
    found = {"exact": totals(sharded())}
    for name, codec in CODECS.items():
        model = sharded()
        compressed = compress(model, codec(), fn.classic())
        found[name] = totals(model), without_rank(compressed.state_dict())
    return found


def undelivered(states, group: str, align: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean over the ranks of what their errors hold of each parameter: row r was on its way to rank r."""
    world, found, start = len(states), {}, 0
    rows = torch.stack([state[f"{group}.reduce_scatter"] for state in states]).mean(0).view(world, -1)
    for name, g in like.items():
        chunk = -(-g.shape[0] // world)
        width = chunk * (g.numel() // g.shape[0])
        found[name] = rows[:, start : start + width].reshape(world * chunk, *g.shape[1:])[: g.shape[0]]
        start += -(-width // align) * align
    assert start == rows.shape[1]
    return found


def group_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks") else "(root)"


def test_what_was_delivered_and_the_errors_are_what_was_sent():
    """The invariant of classic feedback, for uneven shards on three ranks; rows are padded where the codec needs it."""
    ranks = run(3, delivered_on_a_rank)
    exact = ranks[0]["exact"]
    for kind, make in CODECS.items():
        got, states = ranks[0][kind][0], [rank[kind][1] for rank in ranks]
        for group in ("(root)", "blocks.0", "blocks.1"):
            own = {name: g for name, g in exact.items() if group_of(name) == group}
            for name, error in undelivered(states, group, make().align, own).items():
                torch.testing.assert_close(got[name] + error, exact[name], rtol=1e-5, atol=1e-6)
                assert error.numel() < 20 or error.abs().max() > 1e-4


def gathered_on_a_rank():
    """Gather parameters in int8: what is computed with, and how training goes."""
    model = sharded(reshard_after_forward=False)
    shards = {name: p.detach().clone() for name, p in model.named_parameters()}
    compressed = compress(model, fn.identity(), fn.off(), gather=fn.int8(16))
    for part in (model, *model.blocks):
        part.unshard()
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    for part in (model, *model.blocks):
        part.reshard()
    kept = all(torch.equal(whole(p), whole(shards[name])) for name, p in model.named_parameters())
    expected, codec = {}, fn.int8(16)
    for name, p in shards.items():
        pieces = whole(p).chunk(2)
        decoded = [codec.decode(codec.encode(x.reshape(1, -1))).view(x.shape) for x in pieces]
        expected[name] = torch.cat(decoded)
    wrong = [name for name, p in seen.items() if not torch.equal(whole(p), expected[name])]
    return wrong, kept, compressed.sent.sent


def test_parameters_that_are_gathered_in_codes_are_the_same_on_all_ranks_and_stay_exact_at_home():
    for wrong, kept, sent in run(2, gathered_on_a_rank):
        assert wrong == []
        assert kept
        assert {kind for _, kind in sent} == {"all_gather"}


def replicas_on_a_rank():
    """Two shards, two replicas of each: by FSDP2 itself, with exact replicas of ours, and with replicas in codes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    found, data = {}, batches(3)
    exact = train(sharded(mesh), data)
    hybrid = sharded(mesh)
    compress(hybrid, fn.identity(), fn.off())
    found["hybrid"] = same(train(hybrid, data), exact)
    with pytest.raises(ValueError, match="over the replicas itself"):
        compress(sharded(mesh), replicas=mesh["replicas"])
    ours = sharded(mesh["shards"])
    compress(ours, fn.identity(), fn.off(), replicas=Replicas(mesh["replicas"], fn.identity(), fn.off()))
    found["replicas"] = same(train(ours, data), exact)
    ours = sharded(mesh["shards"])
    straight = Replicas(mesh["replicas"], fn.identity(), fn.off(), servers=False)
    compressed = compress(ours, fn.identity(), fn.off(), replicas=straight)
    found["without servers"] = same(train(ours, data), exact)
    found["straight"] = {how for axis, how in compressed.sent.sent if axis == "replicas"}
    options = {"reshard_after_forward": 2}  # after the forward pass shards of half the size remain, on two ranks
    exact = train(sharded(**options), data)
    smaller = sharded(**options)
    compress(smaller, fn.identity(), fn.off(), gather=fn.identity())
    pairs = zip(train(smaller, data), exact, strict=True)
    found["smaller mesh"] = max((x - y).abs().max().item() for x, y in pairs)  # four ranks: other orders of addition
    coded = sharded(mesh["shards"])
    compressed = compress(coded, fn.identity(), fn.off(), replicas=Replicas(mesh["replicas"], fn.sign(), fn.classic()))
    found["sums"] = [totals(model, local) for model in (sharded(mesh), coded)]
    found["sent"] = {axis for axis, _ in compressed.sent.sent}
    found["state"] = without_rank(compressed.state_dict())
    apart = sharded(mesh["shards"])
    with torch.no_grad():
        apart.blocks[1][0].bias.add_(mesh["replicas"].get_local_rank())
    compress(apart, replicas=mesh["replicas"])
    with pytest.raises(fn.RanksDisagree) as refused:
        train(apart, data)
    found["apart"] = str(refused.value)
    return found


def test_the_axis_of_replicas_is_averaged_exactly_or_in_codes():
    """In codes, what was delivered and the errors of both halves are what was sent, shard by shard."""
    ranks = run(4, replicas_on_a_rank)
    for found in ranks:
        assert found["hybrid"]
        assert found["replicas"]
        assert found["without servers"]
        assert found["straight"] == {"all_gather"}
        assert found["smaller mesh"] < 1e-5
        assert found["sent"] == {"shards", "replicas"}
        assert "the numbers of blocks.1.0.bias in blocks.1 are others on rank 1 of axis 'replicas'" in found["apart"]
    for first, second in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):  # the two replicas of a shard
        exact, got = first["sums"]
        for group in ("(root)", "blocks.0", "blocks.1"):
            names = [name for name in exact if group_of(name) == group]
            (bucket,) = layout.buckets([exact[name] for name in names], 2, 8, "flat")
            worker, server = (
                [rank["state"][f"{group}.replicas.{half}.0"] for rank in (first, second)]
                for half in ("worker", "server")
            )
            errors = layout.split(torch.stack(worker).mean(0) + torch.cat(server), bucket)
            for name, error in zip(names, errors, strict=True):
                torch.testing.assert_close(got[name] + error, exact[name], rtol=1e-5, atol=1e-5)
                assert error.numel() < 20 or error.abs().max() > 1e-3


def loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def wire_on_a_rank():
    """Reduce 2^20 gradients exactly and in int4; return the bytes that the loopback interface and the ledger saw."""
    group, n = dist.group.WORLD, 1 << 19
    model = fully_shard(nn.Linear(1024, 1024, bias=False))
    exact = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
    compressed = compress(model)
    coded = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
    seen = []
    for comm in (exact, coded):
        least = []
        for _ in range(4):  # others may use the interface too
            x, out = torch.randn(2 * n), torch.empty(n)
            dist.barrier()
            before = loopback()
            dist.barrier()
            comm(out, x, group, dist.ReduceOp.AVG)
            dist.barrier()
            least.append(loopback() - before)
        seen.append(min(least))
    return seen, compressed.sent.total // 4


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="reads the counters of the interface from /proc")
def test_the_wire_carries_a_seventh_of_the_gradient():
    for (exact, coded), ledger in run(2, wire_on_a_rank):
        assert ledger * 7 <= (1 << 19) * 4
        assert coded * 7 <= exact
        assert exact >= 2 * (1 << 19) * 4  # two ranks, half of the gradient each


class Own(ReduceScatter):
    """Somebody else's communication object."""

    allocate = __call__ = None


def with_its_last_sparse(state):
    """Return other errors, the last one of which cannot be copied into a dense tensor."""
    errors = {k: torch.ones_like(x) for k, x in state.items() if not k.endswith((".rank", ".widths"))}
    last = max(errors, key=[*state].index)
    return {**state, **errors, last: errors[last].to_sparse()}


def loco_on_a_rank(path: str):
    """Train, save, go on; then load and go on: both must be the same. Then what is refused."""
    rank, found = dist.get_rank(), {}
    options = {"reshard_after_forward": False}

    def fresh():
        model = sharded(**options)
        return model, compress(model), torch.optim.AdamW(model.parameters(), lr=0.02)

    model, compressed, opt = fresh()
    train(model, batches(3), opt=opt)
    found["hops"] = messages(compressed) / (3 * len(compressed.errors))
    exact = sharded(**options)
    train(exact, batches(3))
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    found["attributes"] = [set(vars(p)) - set(vars(q)) for p, q in pairs]
    file = f"{path}/{rank}"
    saved = {"model": model.state_dict(), "opt": opt.state_dict()}
    saved = tree.map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, saved)
    torch.save(compressed.state_dict(), file)
    went_on = train(model, batches(3, seed=2), opt=opt)

    model, compressed, opt = fresh()
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    compressed.load_state_dict(torch.load(file, weights_only=True))
    found["resumed"] = same(train(model, batches(3, seed=2), opt=opt), went_on)
    found["errors"] = {name: type(error).__name__ for name, error in compressed.errors.items()}

    dcp.save({"errors": compressed}, checkpoint_id=f"{path}/dcp")
    before = {k: v.clone() for k, v in compressed.state_dict().items()}
    compressed = compress(sharded(**options))
    dcp.load({"errors": compressed}, checkpoint_id=f"{path}/dcp")
    found["of all ranks"] = all(torch.equal(v, before[k]) for k, v in compressed.state_dict().items())
    other = sharded(width=12)
    wrong = {
        "another width": compress(other).state_dict(),
        "another rank": torch.load(f"{path}/{1 - rank}", weights_only=True),
        "another grouping": compress(fully_shard(Net())).state_dict(),
        "another feedback": compress(sharded(), feedback=fn.classic()).state_dict(),
        "its last error sparse": with_its_last_sparse(compressed.state_dict()),
    }
    for name, state in wrong.items():
        with pytest.raises(ValueError, match="state_dict: ") as refused:
            compressed.load_state_dict(state)
        found[name] = str(refused.value)
    found["unchanged"] = all(torch.equal(v, before[k]) for k, v in compressed.state_dict().items())

    comms = [block._get_fsdp_state() for block in model.blocks]

    def own():
        theirs = fully_shard(Net())
        theirs.set_custom_reduce_scatter(Own())
        compress(theirs)

    def several_dtypes():
        mixed = Net()
        mixed.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        compress(fully_shard(mixed), gather=fn.int8())

    def over_the_axis_of_its_shards():
        with fn.bind({"data": dist.group.WORLD}):
            fn.Optimizer(model.parameters(), partial(fn.adamw, axis="data"))

    refusals = {
        "twice": lambda: compress(model),
        "own": own,
        "dtypes": several_dtypes,
        "not sharded": lambda: compress(Net()),
        "optimizer": over_the_axis_of_its_shards,
        "disagree": lambda: compress(sharded(), fn.int4(8 if rank else 16)),
        "gather on one": lambda: compress(sharded(), gather=fn.int8() if rank else None),
        "no codec": lambda: compress(sharded(), "int4"),
        "no feedback": lambda: compress(sharded(), feedback=fn.damped),
        "no gather": lambda: compress(sharded(), gather="int8"),
        "no replicas": lambda: compress(sharded(), replicas="replicas"),
    }
    for name, refused in refusals.items():
        with pytest.raises((ValueError, TypeError)) as error:
            refused()
        found[name] = str(error.value)
    found["not undone"] = comms == [block._get_fsdp_state() for block in model.blocks]
    return found


def test_loco_resumes_bit_for_bit_and_refuses_what_does_not_fit(tmp_path):
    """On the CPU, by one message a group, where DeepSpeed's has two and hangs its errors on CUDA parameters.

    Differs: fn.adapters.fsdp.fully_shard.compress: in one hop, not two; on any device; errors are state that is saved,
        not attributes of parameters.
    """
    for rank, found in enumerate(run(2, loco_on_a_rank, str(tmp_path))):
        assert found["hops"] == 1
        assert not set().union(*found["attributes"])
        assert found["resumed"]
        assert found["errors"] == {"(root)": "DampedError", "blocks.0": "DampedError", "blocks.1": "DampedError"}
        assert found["unchanged"]
        assert found["not undone"]
        assert found["of all ranks"]
        here = f"rank {rank} of 2"
        assert f"is of rank {1 - rank} of 2, but this is {here}; errors belong to" in found["another rank"]
        assert f"'{here}.(root).widths' is [54, 6, 12, 1], but is [63, 7, 13, 1] here" in found["another width"]
        assert f"'{here}.blocks.0.rank' is missing; errors belong to" in found["another grouping"]
        assert f"'{here}.(root).reduce_scatter' is unexpected" in found["another feedback"]
        assert "but got one of its own, Own" in found["own"]
        assert "gather: (root) gathers parameters of several" in found["dtypes"]
        assert "(root) is compressed already; call remove()" in found["twice"]
        assert "holds no FSDPModule; call torch.distributed.fsdp.fully_shard" in found["not sharded"]
        assert "fn.adapters.fsdp.compress" in found["optimizer"]
        assert (
            "Codec.block is 8 on rank 1 and 16 on rank 0" in found["disagree"] or "is 8 on rank 1" in found["disagree"]
        )
        assert "ranks disagree: codec: " in found["disagree"]
        assert "ranks disagree: gather is given on rank 1 and none on rank 0" in found["gather on one"]
        assert "codec: expected a Codec or None, but got 'int4'" in found["no codec"]
        assert "feedback: expected a Feedback or None, but got <" in found["no feedback"]
        assert "gather: expected a Codec, such as fn.sign(), or one per axis, but got 'int8'" in found["no gather"]
        assert "replicas: expected Replicas(...), a DeviceMesh or a process group, but got str" in found["no replicas"]


def faults_on_a_rank():
    rank, found = dist.get_rank(), {}
    model = sharded()
    compressed = compress(model, fn.int4(8))
    train(model, batches(2))
    before = {k: v.clone() for k, v in compressed.state_dict().items()}
    x = batches(1)[0]
    if rank == 1:
        x[0, 0] = float("inf")
    model(x).sum().backward()
    found["nan everywhere"] = all(whole(p.grad).isnan().all() for p in model.parameters() if p.requires_grad)
    after = compressed.state_dict()
    found["errors rest"] = all(torch.equal(v, before[k]) for k, v in after.items() if not k.endswith("skipped"))
    found["skipped"] = compressed.skipped
    model.zero_grad()

    class Partly(Net):
        def forward(self, x):
            return self.first(x)

    part = fully_shard(Partly())
    compressed = compress(part)
    with pytest.raises(RuntimeError) as refused:
        part(batches(1)[0]).sum().backward()
    found["partly"] = str(refused.value), messages(compressed)
    still = fully_shard(nn.Sequential(fully_shard(nn.Linear(9, 9).requires_grad_(False)), nn.Linear(9, 1)))
    compressed = compress(still)
    train(still, batches(2))
    found["frozen group"] = messages(compressed)
    part = fully_shard(Partly())
    if hasattr(part, "set_reduce_scatter_unused_params"):  # from torch 2.12 on
        part.set_reduce_scatter_unused_params(True)
        compressed = compress(part)
        part(batches(1)[0]).sum().backward()
        found["wholly"] = messages(compressed)
    return found


def test_non_finite_gradients_and_missing_ones_leave_the_errors_alone():
    for found in run(2, faults_on_a_rank):
        assert found["nan everywhere"]
        assert found["errors rest"]
        assert found["skipped"] == 3
        text, sent = found["partly"]
        assert "(root) reduces 140 elements of torch.float32, but was compressed with 1652" in text
        assert "set_reduce_scatter_unused_params(True)" in text
        assert sent == 0
        assert found.get("wholly", 1) == 1
        assert found["frozen group"] == 2
