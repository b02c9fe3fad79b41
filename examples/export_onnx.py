"""Train on ranks, write an ONNX file, and let ONNX Runtime predict without mpishard."""

import mpishard as ms
import numpy as np
import onnxruntime


def main(backend, path="model.onnx"):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2000, 8)).astype(np.float32)
    y = (np.linalg.norm(x, axis=1) > 2.7).astype(np.int64)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, "fsdp")
    model = ms.nn.MLP([8, 64, 2], loss=ms.nn.CrossEntropy())
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model, x_train=x, y_train=y, batch_size=100, epochs=3, progress=False
        )
    )
    ms.export_onnx(result.model, path)  # every rank calls it; rank 0 writes
    expected = result.model.predict(x[:5])
    if backend.rank == 0:
        session = onnxruntime.InferenceSession(path)
        (logits,) = session.run(None, {"x": x[:5]})
        print("as predicted, to 1e-5:", np.abs(logits - expected).max() < 1e-5)


if __name__ == "__main__":
    ms.launch(main, world_size=2)
