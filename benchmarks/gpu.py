"""The proof on a GPU: kernels, steps, overlap and correctness, each against a limit that was set before it ran.

    python benchmarks/gpu.py all --json out/gpu.json               # nine parts of at most 9 minutes, by value
    python benchmarks/gpu.py alike --json out/gpu_alike.json       # one of them
    python benchmarks/gpu.py all --device cpu --quick              # tries the script itself where there is no GPU

    alike      every named optimizer steps as on the CPU, in place as purely, and an Inf changes nothing
    overlap    two ranks on one GPU: over NCCL, over gloo where that fails; steps behind the backward pass
    step       time, launches, waits and memory of steps at 1.3 billion parameters
    sweep      warps, blocks and registers of the hottest kernels; --write keeps the best
    deep       vectors above 2**31 elements, NaN, memory that is misaligned or strided, compute-sanitizer
    kernels    conformance, and the share of a copy's bandwidth
    methods    exchanges of local steps, low rank, cosines, votes, at 124 million and 1.3 billion parameters
    cold       an empty cache of kernels: construction, the first step, the freeze
    curve      a training run against AdamW, and against the same on the CPU

Checks run in another process, one after the other. One that raises, crashes or takes too long is a row that failed, and
the next one gets a fresh process. What a check found is in the JSON before the next one begins. The exit code is 1 if a
limit was missed, a check failed or a kernel was refused.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as for `python -m`: here `gpu` is this file and a folder

from benchmarks.gpu.parts import main  # noqa: E402

if __name__ == "__main__":
    main(__doc__)
