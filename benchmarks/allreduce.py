"""The whole compressed all-reduce on real ranks, against DeepSpeed's sequence and the plain fp32 all-reduce.

    python benchmarks/allreduce.py --json benchmarks/results/allreduce.json

Every rank has one thread, or a device (`--device`, `--backend`); all contenders are interleaved in one run, with a
barrier before each. The time is that of the slowest rank. Once with the default malloc and once with one that keeps its
pages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import textbook
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import add_device, backend_of, device_of, of_rank
from measure import about, interleaved, markdown, with_both_mallocs, write
from torch import Tensor

import fn
from fn.collectives.compressed import compressed_all_reduce
from fn.collectives.hierarchy import initial_errors

TEXTBOOK, EXACT = "DeepSpeed's sequence, in textbook.py", "float32"


def as_deepspeed(x: Tensor, worker: Tensor, server: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Average in four collectives, as DeepSpeed's compressed backends do."""
    size = dist.get_world_size()
    bits, scale, worker = textbook.encode(x, worker)
    received = torch.empty_like(bits)
    dist.all_to_all_single(received, bits)
    scales = [torch.empty(1, device=x.device) for _ in range(size)]
    dist.all_gather(scales, scale.view(1))
    bits, scale, server = textbook.serve(received.view(size, -1), torch.cat(scales), server)
    messages = [torch.empty_like(bits) for _ in range(size)]
    dist.all_gather(messages, bits)
    dist.all_gather(scales, scale.view(1))
    return textbook.decode(torch.stack(messages), torch.cat(scales)), worker, server


def contenders(n: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name; errors go from call to call."""
    x = torch.randn(n, device=device)
    total = x.clone()
    sizes = n, n // dist.get_world_size()
    state: dict[str, Any] = {"deepspeed": tuple(torch.zeros(m, device=device) for m in sizes)}

    def deepspeed() -> None:
        _, *state["deepspeed"] = as_deepspeed(x, *state["deepspeed"])

    def ours(codec: fn.Codec, feedback: fn.Feedback) -> Callable[[], None]:
        name = f"{id(codec)} {id(feedback)}"
        state[name] = initial_errors(x, "data", codec, feedback)
        mine = [x.clone()]

        def run() -> None:
            # As in an optimizer's step: the vector is one that is consumed, and the next has the memory of the mean.
            mean, state[name] = compressed_all_reduce(mine[0], state[name], "data", codec, feedback, consume=True)
            mine[0] = mean

        return run

    return {
        TEXTBOOK: deepspeed,
        EXACT: lambda: dist.all_reduce(total),
        "fn, sign, lazy error": ours(fn.sign(), fn.classic(lazy=True)),
        "fn, sign, plain error": ours(fn.sign(), fn.classic()),
        "fn, int4, damped error": ours(fn.int4(), fn.damped()),
    }


def rank(index: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank, and write the medians."""
    torch.set_num_threads(1)
    torch.manual_seed(index)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    device = of_rank(device_of(options), index)
    backend = backend_of(options, options.ranks)
    dist.init_process_group(backend, store=store, rank=index, world_size=options.ranks)
    with fn.bind({"data": dist.group.WORLD}), fn.ledger() as sent:
        found = contenders(options.n, device)
        one = {name: _bytes(run, sent) for name, run in found.items()} | uncounted(options.n, options.ranks)
        passed, spent = interleaved(found, options.rounds, dist.barrier, device)
    result = {"seconds": passed, "processor seconds": spent, "bytes": one}
    Path(f"{folder}/{index}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def uncounted(n: int, ranks: int) -> dict[str, int]:
    """Return the bytes of those that the ledger does not see: bits and scales in two halves; a ring's float32."""
    return {TEXTBOOK: 2 * (ranks - 1) * (n // 8 // ranks + 4), EXACT: 2 * (ranks - 1) * 4 * n // ranks}


def _bytes(run: Callable[[], Any], sent: fn.Ledger) -> int:
    before = sent.total
    run()
    return sent.total - before


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks and return the medians of the slowest."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (options, folder), options.ranks)
        found = [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(options.ranks)]
    clocks = ("seconds", "processor seconds")
    slowest = {clock: {name: max(f[clock][name] for f in found) for name in found[0][clock]} for clock in clocks}
    return {**slowest, "bytes": found[0]["bytes"]}


def table(result: dict[str, Any]) -> str:
    """Return the figures of the default malloc as Markdown."""
    found, rows = result["malloc"]["default"], []
    for name, seconds in found["seconds"].items():
        ratios = [f"{found['seconds'][peer] / seconds:.1f}" for peer in (TEXTBOOK, EXACT)]
        spent = f"{1e3 * found['processor seconds'][name]:.1f}"
        rows.append([name, f"{found['bytes'][name] / 1e6:.2f}", f"{1e3 * seconds:.1f}", spent, *ratios])
    head = "| all-reduce | MB sent | ms | of the processor, ms | times as fast as DeepSpeed's sequence | as float32 |"
    return markdown(head, rows)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    add_device(parser, backend=True)
    parser.add_argument("--json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    arguments = [f"--n={options.n}", f"--rounds={options.rounds}", f"--ranks={options.ranks}"]
    arguments += [f"--device={device_of(options).type}", f"--backend={backend_of(options, options.ranks)}"]
    malloc = with_both_mallocs(__file__, arguments)
    result = {"about": about(), "n": options.n, "ranks": options.ranks, "malloc": malloc}
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
