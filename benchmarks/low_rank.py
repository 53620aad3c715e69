"""The mean of gradients as thin factors, on real ranks, against PyTorch's PowerSGD hook and the plain all-reduce.

    python benchmarks/low_rank.py --json benchmarks/results/low_rank.json

The gradients are those of a transformer, 10.6 million numbers. Each contender leaves the mean in the memory of the
gradients. All are interleaved in one run, with new gradients and a barrier before each; the time is that of the slowest
rank. Once with the default malloc and once with one that keeps its pages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import about, interleaved, markdown, with_both_mallocs, write
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import fn

RANKS = (1, 4, 32)
HOOK, OURS = "torch's PowerSGD hook", "fn.low_rank_average"


class Bucket:
    """What the hook asks of DDP's bucket. grads: views of one vector."""

    def __init__(self, vector: Tensor, grads: list[Tensor]):
        self.vector, self.grads = vector, grads

    def buffer(self) -> Tensor:
        """Return all gradients as one vector."""
        return self.vector

    def gradients(self) -> list[Tensor]:
        """Return them in their shapes."""
        return self.grads

    def index(self) -> int:
        """Return the number of the bucket."""
        return 0

    def is_last(self) -> bool:
        """Return whether it is the last one."""
        return True


def shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """Return those of a transformer without its embeddings."""
    of_layer = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    return [*of_layer, (width, 4 * width), (width,), (width,), (width,)] * layers


def contenders(sizes: list[tuple[int, ...]]) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """Return what is timed, by name, and what puts new gradients where all find them."""
    params = [torch.zeros(size) for size in sizes]
    ends = [p.numel() for p in params]
    fresh = torch.randn(sum(ends))
    vector = fresh.clone()
    grads = [part.view(size) for part, size in zip(vector.split(ends), sizes, strict=True)]
    found: dict[str, Callable[[], Any]] = {"all-reduce in float32": lambda: dist.all_reduce(vector)}
    for r in RANKS:
        state = PowerSGDState(None, r, start_powerSGD_iter=2, min_compression_rate=1, orthogonalization_epsilon=1e-8)
        state.iter = 2
        bucket = Bucket(vector, grads)
        found[f"{HOOK}, rank {r}"] = lambda state=state, bucket=bucket: powerSGD_hook(state, bucket).wait()
        found[f"{OURS}, rank {r}"] = ours(r, params, grads)

    def before() -> None:
        vector.copy_(fresh)
        dist.barrier()

    return found, before


def ours(r: int, params: list[Tensor], grads: list[Tensor]) -> Callable[[], None]:
    """Return a step of `fn.low_rank_average` that writes the mean over the gradients."""
    tx = fn.low_rank_average("data", r)
    update, state = tx.update(fn.Phase.COMPRESSED), [tx.init(params)]

    def run() -> None:
        with torch.no_grad():
            mean, state[0] = update(grads, state[0], params)
            torch._foreach_copy_(grads, mean)

    return run


def counted(run: Callable[[], Any]) -> int:
    """Return the bytes a rank sends for the vectors that it hands to all-reduces, as `fn.ledger` counts them."""
    real, sizes = dist.all_reduce, list[int]()

    def all_reduce(x: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(x.numel() * x.element_size())
        return real(x, *args, **options)

    dist.all_reduce = all_reduce
    try:
        run()
    finally:
        dist.all_reduce = real
    world = dist.get_world_size()
    return 2 * (world - 1) * sum(sizes) // world


def rank(index: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank, and write the medians."""
    torch.set_num_threads(1)
    torch.manual_seed(index)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=index, world_size=options.ranks)
    with fn.bind({"data": dist.group.WORLD}):
        found, before = contenders(shapes(options.layers, options.width))
        sent = {}
        for name, run in found.items():
            before()
            with fn.ledger() as ledger:
                sent[name] = counted(run)
            if name.startswith(OURS) and ledger.total != sent[name]:
                raise AssertionError(f"{name}: the ledger says {ledger.total}, and not {sent[name]}")
        passed, spent = interleaved(found, options.rounds, before)
    result = {"seconds": passed, "processor seconds": spent, "bytes": sent}
    Path(f"{folder}/{index}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks and return the medians of the slowest."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (options, folder), options.ranks)
        found = [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(options.ranks)]
    clocks = ("seconds", "processor seconds")
    slowest = {clock: {name: max(f[clock][name] for f in found) for name in found[0][clock]} for clock in clocks}
    return {**slowest, "bytes": found[0]["bytes"]}


def table(result: dict[str, Any]) -> str:
    """Return the processor time of a rank as Markdown, with either malloc."""
    default, kept = (result["malloc"][malloc] for malloc in ("default", "keeps pages"))
    rows = []
    for name, size in default["bytes"].items():
        cells = [f"{size / 1e3:.0f}"]
        for times in (default["processor seconds"], kept["processor seconds"]):
            peer = times.get(name.replace(OURS, HOOK), times[name])
            cells += [f"{1e3 * times[name]:.1f}", f"{times[name] / peer:.2f}" if name.startswith(OURS) else ""]
        rows.append([name, *cells])
    return markdown("| average | kB sent | ms | of the hook's | pages kept, ms | of the hook's |", rows)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("layers", 6), ("width", 384), ("rounds", 15), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    given = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "rounds", "ranks")]
    malloc = with_both_mallocs(__file__, given)
    result = {"about": about(), "ranks": options.ranks, "malloc": malloc}
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
