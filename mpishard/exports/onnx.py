"""Export of a model's computation graph as an ONNX file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.base import Array
from mpishard.contracts import PathLike
from mpishard.exports.rank_zero import write_model
from mpishard.nn import ComputationNode, Model, input_of, trace_chain
from mpishard.sharding import ParameterEntry

_OPSET = 20  # Opset 20 is the first with Gelu.
_IR_VERSION = 9  # Version that came with the opset. A reader refuses files of newer versions.
_MAXIMUM_BYTES = 2**31 - 1  # Maximum size of a message of Protocol Buffers.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # Fields of ModelProto, GraphProto and TensorProto.


def export_onnx(model: object, path: PathLike) -> None:
    """Write the function ``model.predict`` as an ONNX file, in float32.

    ONNX Runtime's results differ from the model's by rounding (about 1e-6). The input is named
    "x", the output "y". The batch dim has any size; so has the time dim if the layers allow it.
    Inputs are float32, or int64 tokens. Parameters keep the names of the parameter table. Dropout
    is left out. Collective if the model is sharded: rank 0 writes, unit by unit.

    Parameters
    ----------
    model : object
        A model of `mpishard.nn`, plain or sharded, on any device.
    path : path
        File to make or replace.

    Raises
    ------
    ImportError
        If onnx is not installed: ``pip install "mpishard[onnx]"``.
    TypeError
        If the model is not one of `mpishard.nn`.
    ValueError
        If the model has layers of the user's own, which ONNX cannot represent, or has more than
        2 GiB of parameters.
    OSError
        If the file cannot be written. Every rank raises it.
    """
    write_model(path, model, _content)


def _content(model: object, values: Iterator[Array]) -> Iterator[memoryview | bytes]:
    if not isinstance(model, Model):
        raise TypeError(f"export_onnx needs a model of mpishard.nn, got a {type(model).__name__}")
    try:
        import onnx
    except ImportError as error:
        raise ImportError('ONNX files need onnx: pip install "mpishard[onnx]"') from error
    entries = model.parameter_table.entries
    size = 4 * sum(entry.size for entry in entries)
    if size > _MAXIMUM_BYTES:
        raise ValueError(f"the parameters take {size} bytes; an ONNX file can have 2 GiB")
    # The graph is traced without values, which are written one by one. This array of zeros takes no
    # memory.
    nothing = np.broadcast_to(np.zeros((), model.dtype), model.parameter_count)
    shape = tuple(model.get_input_shape())
    x = input_of([], shape, model.get_dynamic_shape_info())
    y = trace_chain(model.chain, model.parameter_table, nothing, x, shape)
    graph = _Graph(onnx, y)
    helper, kinds = onnx.helper, onnx.TensorProto
    kind = kinds.INT64 if model.chain.takes_integers else kinds.FLOAT
    made = helper.make_graph(
        graph.nodes,
        type(model).__name__,
        [
            helper.make_tensor_value_info("x", kind, _shape(x)),
            *(helper.make_tensor_value_info(e.name, kinds.FLOAT, e.shape) for e in entries),
        ],
        [helper.make_tensor_value_info("y", kinds.FLOAT, _shape(y))],
        [onnx.numpy_helper.from_array(v, name) for name, v in graph.constants.items()],
    )
    file = helper.make_model(
        made,
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="mpishard",
    )
    # The check compares all shapes, so that a wrongly translated layer is found here.
    onnx.checker.check_model(file, full_check=True)
    # Parameters are inputs only for the check. In the file they are constants.
    del file.graph.input[1:]
    return _encoded(file, kinds, entries, values)


def _encoded(
    file: Any, kinds: Any, entries: Sequence[ParameterEntry], values: Iterator[Array]
) -> Iterator[memoryview | bytes]:
    """Yield the bytes of ``file`` with the parameters.

    They are encoded here, because Protocol Buffers would copy the parameters three times.
    """
    # Fields of a message may be in any order, so that the parameters can come last.
    begin = file.graph.SerializeToString()
    file.ClearField("graph")
    heads = []
    for entry in entries:
        # Data type 1 is FLOAT.
        head = kinds(dims=entry.shape, data_type=1, name=entry.name)
        data = head.SerializeToString() + _field(_RAW_DATA, 4 * entry.size)
        heads.append(_field(_INITIALIZER, len(data) + 4 * entry.size) + data)
    length = len(begin) + sum(map(len, heads)) + 4 * sum(entry.size for entry in entries)
    yield file.SerializeToString() + _field(_GRAPH, length) + begin
    for head, value in zip(heads, values, strict=True):
        yield head
        # Raw data of ONNX are little-endian on every machine.
        yield np.ascontiguousarray(value, "<f4").data.cast("B")


class _Graph:
    """ONNX nodes and constants of a computation graph, whose output is named "y"."""

    def __init__(self, onnx: Any, output: ComputationNode) -> None:
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self._names: dict[ComputationNode, str] = {}
        for node in output.walk():
            self._names[node] = self._add(node)
        self.nodes.append(onnx.helper.make_node("Identity", [self._names[output]], ["y"]))

    def _add(self, node: ComputationNode) -> str:
        """Add the operations of a node, and return the name of its result."""
        if node.op == "input":
            return "x"
        if node.op == "constant":  # All constants are parameters.
            return node.name
        if node.op == "layer":
            layer = type(node.attributes["layer"]).__name__
            raise ValueError(f"ONNX has no operation for {layer}, a layer that is not of mpishard")
        if node.op not in _OPERATIONS:
            raise ValueError(f"ONNX has no operation for {node.op!r}")
        names = [self._names[given] for given in node.inputs]
        return _OPERATIONS[node.op](self, node, *names)

    def constant(self, value: object) -> str:
        """Add a constant, and return its name; integers become int64."""
        array = np.asarray(value)
        # ONNX takes shapes and axes as int64.
        array = array.astype(np.int64) if array.dtype.kind == "i" else array
        name = f"constant{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(array).reshape(array.shape)
        return name

    def number(self, value: float) -> str:
        """Add a float32 constant, and return its name."""
        return self.constant(np.float32(value))

    def apply(self, op: str, *names: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add an ONNX operation, and return the name of its result, or names if it has several."""
        made = [f"{op}{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(self._onnx.helper.make_node(op, names, made, **attributes))
        return made[0] if outputs == 1 else made


def _field(number: int, length: int) -> bytes:
    """Return the key and length that precede a field of ``length`` bytes.

    See https://protobuf.dev/programming-guides/encoding.
    """
    text = bytearray([number << 3 | 2])
    while length > 0x7F:
        text.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*text, length])


def _shape(node: ComputationNode) -> list[int | str]:
    return ["batch", *(f"dim{i}" if n is None else n for i, n in enumerate(node.shape[1:], 1))]


def _simple(op: str, **attributes: object) -> Callable[..., str]:
    return lambda graph, node, *names: graph.apply(op, *names, **attributes)


def _silu(graph: _Graph, x: str) -> Any:
    return graph.apply("Mul", x, graph.apply("Sigmoid", x))


def _swiglu(graph: _Graph, _: ComputationNode, x: str) -> Any:
    gate, value = graph.apply("Split", x, outputs=2, axis=-1, num_outputs=2)
    return graph.apply("Mul", _silu(graph, gate), value)


def _rms_norm(graph: _Graph, node: ComputationNode, x: str, weight: str) -> Any:
    mean = graph.apply("ReduceMean", graph.apply("Mul", x, x), graph.constant([-1]))
    shifted = graph.apply("Add", mean, graph.number(node.attributes["epsilon"]))
    scaled = graph.apply("Div", x, graph.apply("Sqrt", shifted))
    return graph.apply("Mul", weight, scaled)


def _zero_columns(graph: _Graph, node: ComputationNode, x: str) -> Any:
    width = node.shape[-1]
    assert width is not None
    is_zero = np.isin(np.arange(width), node.attributes["columns"])
    return graph.apply("Where", graph.constant(is_zero), graph.number(0), x)


def _split_heads(graph: _Graph, node: ComputationNode, x: str) -> Any:
    heads, kv_heads, part = (node.attributes[name] for name in ("heads", "kv_heads", "part"))
    size = node.shape[-1]
    assert size is not None
    count = heads if part == 0 else kv_heads
    start = (0, heads, heads + kv_heads)[part] * size
    ends = (graph.constant([start]), graph.constant([start + count * size]))
    own = graph.apply("Slice", x, *ends, graph.constant([-1]))
    if count < heads:  # Each head of keys or values is repeated for the queries that share it.
        own = graph.apply("Reshape", own, graph.constant([0, 0, count, 1, size]))
        own = graph.apply("Expand", own, graph.constant([1, 1, 1, heads // count, 1]))
    own = graph.apply("Reshape", own, graph.constant([0, 0, heads, size]))
    return graph.apply("Transpose", own, perm=[0, 2, 1, 3])


def _scores(graph: _Graph, node: ComputationNode, q: str, k: str) -> Any:
    size = node.inputs[0].shape[-1]
    assert size is not None
    products = graph.apply("MatMul", q, graph.apply("Transpose", k, perm=[0, 1, 3, 2]))
    return graph.apply("Mul", products, graph.number(1 / math.sqrt(size)))


def _causal_scores(graph: _Graph, node: ComputationNode, q: str, k: str) -> Any:
    found = _scores(graph, node, q, k)
    times = graph.apply("Shape", found, start=2, end=4)
    infinity = graph._onnx.numpy_helper.from_array(np.array([-np.inf], np.float32))
    later = graph.apply("ConstantOfShape", times, value=infinity)
    return graph.apply("Add", found, graph.apply("Trilu", later, graph.constant(1), upper=1))


def _add_by_channel(graph: _Graph, node: ComputationNode, x: str, bias: str) -> Any:
    shape = graph.constant([-1, *(1,) * (len(node.shape) - 2)])
    return graph.apply("Add", x, graph.apply("Reshape", bias, shape))


_OPERATIONS: Mapping[str, Callable[..., str]] = {
    "add": _simple("Add"),
    "add_by_channel": _add_by_channel,
    "cast": lambda graph, node, x: x,  # All numbers in the file are float32.
    "causal_scores": _causal_scores,
    "convolve": lambda graph, node, x, weight: graph.apply(
        "Conv", x, weight, strides=[*node.attributes["stride"]],
        pads=[*node.attributes["padding"]] * 2,
    ),
    "first_rows": lambda graph, node, table, x: graph.apply(
        "Slice", table, graph.constant([0]), graph.apply("Shape", x, start=1, end=2),
        graph.constant([0]),
    ),
    "flatten": _simple("Flatten"),
    "gelu": _simple("Gelu", approximate="tanh"),
    "layer_norm": lambda graph, node, *names: graph.apply(
        "LayerNormalization", *names, epsilon=node.attributes["epsilon"]
    ),
    "matmul_transposed": lambda graph, node, x, weight: graph.apply(
        "MatMul", x, graph.apply("Transpose", weight, perm=[1, 0])
    ),
    "max_pool": lambda graph, node, x: graph.apply(
        "MaxPool", x, kernel_shape=[*node.attributes["kernel"]],
        strides=[*node.attributes["stride"]],
    ),
    "merge_heads": lambda graph, node, y: graph.apply(
        "Reshape", graph.apply("Transpose", y, perm=[0, 2, 1, 3]), graph.constant([0, 0, -1])
    ),
    "relu": _simple("Relu"),
    "rms_norm": _rms_norm,
    "scores": _scores,
    "sigmoid": _simple("Sigmoid"),
    "silu": lambda graph, node, x: _silu(graph, x),
    "softmax": _simple("Softmax"),
    "split_heads": _split_heads,
    "swiglu": _swiglu,
    "take_rows": _simple("Gather"),
    "tanh": _simple("Tanh"),
    "weighted_sum": _simple("MatMul"),
    "zero_columns": _zero_columns,
}  # fmt: skip
