"""Fit a decaying wave: any NumPy function that returns a loss and its gradient is a model."""

import mpishard as ms
import numpy as np


def fun(theta, x, y):
    decay, wave = np.exp(-theta[0] * x), np.cos(theta[1] * x)
    error = decay * wave - y
    gradient = np.array([-x * decay * wave, -x * decay * np.sin(theta[1] * x)]) @ error
    return np.mean(error**2), 2 * gradient / len(x)


def main(backend):
    x = np.linspace(0, 3, 1000)
    y = np.exp(-0.7 * x) * np.cos(2.5 * x)
    model = ms.as_distributed(ms.FunctionModel(fun, [1.0, 2.0]), backend, "ddp")
    optimizer = ms.as_distributed(ms.optimizers.AdamW(0.01), backend, "ddp")
    optimizer.optimize(
        ms.OptimizationInputData(model=model, x_train=x, y_train=y, batch_size=100, epochs=60)
    )
    backend.print("decay and frequency:", model.get_parameters().round(4))


if __name__ == "__main__":
    ms.launch(main, world_size=2)
