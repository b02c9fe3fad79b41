"""Runs as printed: `python quickstart.py` (two thread-ranks), `mpirun -n 2 python quickstart.py`."""
import mpishard as ms
import numpy as np

def main(backend):
    x = np.random.default_rng(0).standard_normal((4096, 64))
    y = x @ np.linspace(-1, 1, 64)[:, None]
    model = ms.as_distributed(ms.nn.MLP([64, 128, 1], seed=0), backend, strategy="fsdp")
    optimizer = ms.as_distributed(ms.optimizers.AdamW(learning_rate=3e-3), backend, strategy="fsdp")
    result = optimizer.optimize(ms.OptimizationInputData(model=model, x_train=x, y_train=y, batch_size=256, epochs=5))
    model.save_model("runs/quickstart")          # every rank calls it; loads at any other world size or strategy
    backend.print(f"loss {result.fitness_history[-1]:.2e}")

if __name__ == "__main__":
    ms.launch(main, world_size=2)
