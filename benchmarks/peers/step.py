"""Time of a training step in PyTorch: one process, DDP or FSDP2 over gloo, or mpishard.torch.

    python benchmarks/peers/step.py --strategy fsdp2 --ranks 2
    torchrun --nproc-per-node 2 benchmarks/peers/step.py --strategy fsdp2
    mpiexec -n 2 python benchmarks/peers/step.py --strategy mst-fsdp

One process starts its ranks itself, on this machine's loopback interface. Rank 0 prints one line of
JSON. Needs PyTorch, and for ``mst-ddp`` and ``mst-fsdp`` mpishard.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "gpt", "conv", "encoder", "flow"], default="mlp")
    ours = [f"mst-{name}" for name in ("ddp", "zero1", "zero2", "fsdp")]
    strategies = ["single", "ddp", "fsdp2", *ours]
    parser.add_argument("--strategy", choices=strategies, default="single")
    parser.add_argument("--optimizer", choices=["default", "foreach", "fused"], default="fused")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--batch", type=int, default=None, help="samples per rank")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence of gpt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure resident memory, too")
    parser.add_argument(
        "--bfloat16", action="store_true", help="mixed precision of FSDP2 and mst; else autocast"
    )
    arguments = parser.parse_args()
    by_model = {
        "mlp": (1024, 8, 64),
        "gpt": (256, 4, 8),
        "conv": (32, 3, 16),
        "encoder": (128, 2, 16),
        "flow": (16, 50, 64),
    }
    sizes = by_model[arguments.model]
    for name, default in zip(("width", "layers", "batch"), sizes, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.strategy == "single" and arguments.ranks != 1:
        parser.error(f"--strategy single is one rank, got --ranks {arguments.ranks}")
    if arguments.strategy.startswith("mst") and arguments.ranks != 1:
        parser.error(f"mpiexec -n {arguments.ranks} starts the ranks of mpishard, not --ranks")
    return arguments


def start(arguments: argparse.Namespace) -> int:
    """Run this program again as each of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | {
            "WORLD_SIZE": str(arguments.ranks),
            "PEER_STORE": str(Path(folder) / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(arguments.threads),
        }
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env=common | {"RANK": str(rank)})
            for rank in range(arguments.ranks)
        ]
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):  # one failed, and the others would wait for it
                for rank in ranks:
                    rank.terminate()
            time.sleep(0.05)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def build(arguments: argparse.Namespace) -> tuple[Callable[[], Any], int]:
    """One training step of this rank, and the number of the model's parameters."""
    import models
    import torch

    torch.manual_seed(0)
    B, width = arguments.batch, arguments.width
    if arguments.model == "gpt":
        model = models.GPT(width, 8, arguments.layers, arguments.tokens)
        tokens = torch.randint(0, models.VOCABULARY, (B, arguments.tokens + 1))
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    elif arguments.model == "conv":
        model = models.ResNet(width, arguments.layers)
        x, y = torch.randn(B, 3, 32, 32), torch.randint(0, 10, (B,))
    elif arguments.model == "encoder":
        model = models.Encoder(width, 2, arguments.layers)
        x = torch.randint(0, 30522, (B, models.CONTEXT))
        y = torch.randint(0, 2, (B,))
    else:
        make = models.Flow if arguments.model == "flow" else models.mlp
        model = make(width, arguments.layers)
        x = y = torch.randn(B, width)
    parameters = sum(p.numel() for p in model.parameters())
    if arguments.strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif arguments.strategy == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {}
        if arguments.bfloat16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["mp_policy"] = policy
        for block in models.blocks_of(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
    elif arguments.strategy.startswith("mst"):
        import mpishard.torch as mst

        precision = "bfloat16" if arguments.bfloat16 else None
        mst.shard(model, arguments.strategy.removeprefix("mst-"), precision=precision)
    choice = {} if arguments.optimizer == "default" else {arguments.optimizer: True}
    choice |= {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    if arguments.strategy.startswith("mst"):
        optimizer = mst.optimizer(torch.optim.AdamW, model, **choice)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **choice)

    is_cast = arguments.bfloat16 and arguments.strategy in ("single", "ddp")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            output = model(x)
        models.loss_of(output.float(), y).backward()
        optimizer.step()

    return step, parameters


def proportional_memory() -> int:
    """PSS of this process in bytes: what it shares with n others counts as one n-th."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Pss")


def memory_in(step: Callable[[], Any], steps: int) -> list[int]:
    """PSS between two steps, and the greatest that was seen while stepping."""
    samples = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(proportional_memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    for _ in range(steps):
        step()
    done.set()
    sampler.join()
    resting = proportional_memory()
    return [resting, max(*samples, resting)]


def main(arguments: argparse.Namespace) -> None:
    """Measure as one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(arguments.threads)
    if arguments.strategy.startswith("mst"):
        import mpishard.torch as mst

        mst.init()
        rank, world_size = mst.rank(), mst.world_size()
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if arguments.strategy in ("ddp", "fsdp2"):
        where = os.environ.get("PEER_STORE")
        dist.init_process_group(
            "gloo", f"file://{where}" if where else None, rank=rank, world_size=world_size
        )
    step, parameters = build(arguments)
    for _ in range(arguments.warmup):
        step()
    # Steps follow each other as in training: the collectives of each keep the ranks together.
    moments, processor = [time.perf_counter()], time.process_time()
    for _ in range(arguments.steps):
        step()
        moments.append(time.perf_counter())
    processor = time.process_time() - processor
    memory: list[list[int]] = [memory_in(step, 8)] if arguments.memory else []
    if dist.is_initialized():
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, memory)
        memory = [pair for pairs in gathered for pair in pairs]
        dist.destroy_process_group()
    elif arguments.strategy.startswith("mst") and memory:
        from mpi4py import MPI

        memory = MPI.COMM_WORLD.allgather(memory[0])
    if rank == 0:
        result = {
            "library": f"PyTorch {torch.__version__}",
            "parameters": parameters,
            "processor": processor / arguments.steps,
            "seconds": [b - a for a, b in pairwise(moments)],
        }
        if memory:
            result["resting_bytes"] = sum(resting for resting, _ in memory)
            result["peak_bytes"] = sum(peak for _, peak in memory)
        print(json.dumps(result), flush=True)
    if not arguments.strategy.startswith("mst"):
        # Without PyTorch's exit handlers, which sometimes end a rank of FSDP2 with std::terminate.
        os._exit(0)


if __name__ == "__main__":
    given = parse()
    if "RANK" in os.environ or given.strategy.startswith("mst"):
        main(given)
    else:
        sys.exit(start(given))
