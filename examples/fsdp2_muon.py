"""Muon on FSDP2's shards, also with tensor parallelism; a checkpoint of torch.distributed.checkpoint continues it.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_muon.py --steps 100
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_muon.py --steps 200 --tensor 2

Called again with more steps it goes on from its newest checkpoint, bit for bit; also on another number of ranks, with
or without tensor parallelism. The model and the text are those of `train_lm.py`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_lm import Transformer, cut, join, loss_of, mean_over_ranks, read_standard_library

import fn

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer's products")
parser.add_argument("--out", type=Path, default=Path("out/fsdp2_muon"))
parser.add_argument("--device", help="cpu, cuda, xpu, ...; None is the accelerator, else the CPU")
parser.add_argument("--backend", help="of the process group; None is the device's own")
args = parser.parse_args()
device = join(args)
rank, world = dist.get_rank(), dist.get_world_size()
text = read_standard_library()[0].to(device)

mesh = init_device_mesh(device.type, (world // args.tensor, args.tensor), mesh_dim_names=("shard", "tensor"))
replica = mesh.get_local_rank("shard")  # ranks that share a layer's products see the same text
torch.manual_seed(0)
model = Transformer(2, 64, 4).to(device)
for block in model.blocks if args.tensor > 1 else ():
    # Queries, keys and values lie in one matrix, so heads are whole only where its outputs are.
    plan = {"qkv": ColwiseParallel(output_layouts=Replicate()), "mix": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(block, mesh["tensor"], {**plan, "up": ColwiseParallel(), "down": RowwiseParallel()})
for part in (*model.blocks, model):
    fully_shard(part, mesh=mesh["shard"])
opt = fn.Optimizer(model.named_parameters(), fn.muon, lr=0.02, labels=fn.labels_of(model))


def save() -> None:
    """Save the shards of all ranks."""
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    dcp.save(state, checkpoint_id=args.out / f"{opt.steps:06d}")


def load() -> None:
    """Load this rank's shards of the newest checkpoint, if there is one."""
    if found := sorted(args.out.glob("*/.metadata")):
        state = {"model": model.state_dict(), "opt": opt.state_dict()}
        dcp.load(state, checkpoint_id=found[-1].parent)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])


load()
while opt.steps < args.steps:
    for group in opt.param_groups:
        group["lr"] = 0.02 * min(1.0, (opt.steps + 1) / 10)
    draw = torch.Generator().manual_seed(opt.steps * world + replica)
    loss = loss_of(model, cut(text, torch.randint(len(text) - 64, (8,), generator=draw), 64))
    loss.backward()
    opt.step()
    opt.zero_grad()
    mean = mean_over_ranks(loss.detach())
    if rank == 0 and opt.steps % 10 == 0:
        print(f"step {opt.steps}: loss {mean:.4f}")
    if opt.steps % args.save_every == 0 or opt.steps == args.steps:
        save()
dist.destroy_process_group()
