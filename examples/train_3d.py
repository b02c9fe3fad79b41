"""A mesh of 2 stages x 2 slices x replicas: `python train_3d.py`, `mpirun -n 8 python ...`."""

import mpishard as ms
import numpy as np


def main(backend):
    counts = (np.arange(512)[:, None] + 3 * np.arange(17)) % 32  # in threes: 0 3 6 9 ..
    mesh = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_count": 4}
    model = ms.nn.GPT(vocabulary_size=32, context_length=16, width=32, heads=4, layers=4)
    model = ms.as_distributed(model, backend, "hybrid", **mesh)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(3e-3), backend, "hybrid", **mesh)
    optimizer.optimize(
        ms.OptimizationInputData(
            model=model, x_train=counts[:, :-1], y_train=counts[:, 1:], batch_size=64, epochs=5
        )
    )
    tokens = model.generate([0, 3, 6], 5, temperature=0)
    backend.print(f"{model.mesh.describe()}: after 0 3 6 comes", *tokens[3:])


if __name__ == "__main__":
    ms.launch(main, world_size=8)
