"""DiLoCo between islands, in each of which FSDP2 shards the model; a checkpoint continues it bit for bit.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_diloco.py --islands 2 --steps 100

The islands exchange what 20 steps have moved, in 8 bits. Called again with more steps the script goes on from its
newest checkpoint, on as many islands. The model and the text are those of `train_lm.py`.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_lm import Transformer, cut, join, loss_of, mean_over_ranks, read_standard_library

import fn
import fn.adapters

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--islands", type=int, default=2)
parser.add_argument("--every", type=int, default=20, help="steps from one exchange to the next")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--out", type=Path, default=Path("out/fsdp2_diloco"))
parser.add_argument("--device", help="cpu, cuda, xpu, ...; None is the accelerator, else the CPU")
parser.add_argument("--backend", help="of the process group; None is the device's own")
args = parser.parse_args()
device = join(args)
rank, world = dist.get_rank(), dist.get_world_size()
text, held_out = (x.to(device) for x in read_standard_library())

mesh = init_device_mesh(device.type, (args.islands, world // args.islands), mesh_dim_names=("island", "shard"))
torch.manual_seed(0)
model = Transformer(2, 64, 4).to(device)
for part in (*model.blocks, model):
    fully_shard(part, mesh=mesh["shard"])
with fn.bind(mesh["island"]):
    make = partial(fn.diloco, axis="island", codec=fn.int8())
    opt = fn.Optimizer(model.named_parameters(), make, schedule=fn.every(args.every), lr=2e-3)


def state_dict() -> dict[str, dict[str, torch.Tensor]]:
    """Return the shards of the optimizer, and of this island's own params: between exchanges islands differ."""
    return {f"model of island {mesh.get_local_rank('island')}": model.state_dict(), "opt": opt.state_dict()}


if found := sorted(args.out.glob("*/.metadata")):
    state = state_dict()
    dcp.load(state, checkpoint_id=found[-1].parent)
    own, of_optimizer = state.values()
    model.load_state_dict(own)
    opt.load_state_dict(of_optimizer)
while opt.steps < args.steps:
    draw = torch.Generator().manual_seed(opt.steps * world + rank)
    loss = loss_of(model, cut(text, torch.randint(len(text) - 64, (8,), generator=draw), 64))
    loss.backward()
    opt.step()
    opt.zero_grad()
    if opt.steps % args.save_every == 0 or opt.steps == args.steps:
        dcp.save(state_dict(), checkpoint_id=args.out / f"{opt.steps:06d}")
with torch.no_grad(), fn.adapters.agreed_params(opt):
    starts = torch.linspace(0, len(held_out) - 65, 32).long()
    validation = mean_over_ranks(loss_of(model, cut(held_out, starts, 64)))
    model.reshard()
if rank == 0:
    print(f"step {opt.steps}: validation loss of the agreed params {validation:.4f}")
dist.destroy_process_group()
