"""Model of a PyTorch module, whose parameters are views of mpishard's memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from mpishard.adapters.placed_vector import PlacedVectorModel
from mpishard.base import Array, Document, DType, Metadata, Scalar, optional_package, require_plain
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction, Saved
from mpishard.data import Samples
from mpishard.models import ParameterStore
from mpishard.nn import Context

_BESIDE = "beside"  # Key in saved choices of the module's state beside the vector.
_BUFFERS = "buffers"  # Key in those of earlier releases, which had buffers alone.


class TorchModel(PlacedVectorModel):
    """Model of a ``torch.nn.Module`` on the CPU, for mpishard's optimizers.

    It has the parts of a loop with `mpishard.torch`. The flat vector has the trained parameters,
    and the frozen ones of their dtype, in the order of ``module.named_parameters()``. A complex
    parameter has two real numbers for each element, and real ones of odd sizes then come last. The
    module's parameters become views of it. When the model is sharded they become views of memory
    that the ranks of a node share, and no step copies a parameter. A change in place that every
    rank makes, such as ``p.mul_(0.9)``, is then made once. Autograd's gradients are reduced unit by
    unit during the backward pass.

    Buffers, and frozen parameters of another dtype, stay the module's own. When the model is
    sharded every rank gets those of rank 0. Buffers are sent again after each step that has changed
    one, as batch normalisation does in train mode. Each rank normalises with its own samples or,
    after `mpishard.torch.convert_sync_batchnorm`, with those of all ranks. Checkpoints have all of
    ``state_dict()``.

    Training uses each submodule's own mode, train or eval. `predict` and evaluation use eval mode.
    Random layers (dropout) draw from PyTorch's generator. When the model is sharded, each data rank
    except the first gets a seed of its own. Thread-ranks share one generator, so they cannot use
    such layers on a pipeline or tensor axis, whose ranks must draw the same numbers. Hooks on the
    module, checkpointed segments and tied parameters work. After each pass ``.grad`` of the
    parameters is None.

    As in a loop, a sharded optimizer leaves out a parameter that no rank has used, and one that
    requires no gradient any more: weight decay and momentum do not change it, and its moments and
    count of updates stay. `LBFGS`, `OptaxRule`, optimizers that exchange data between replicas, and
    steps with ``auto_sync_gradients=False`` take its gradient for 0.

    Parameters
    ----------
    module : torch.nn.Module
        Module that returns one tensor with as many samples as its input. The input is one array, or
        the arrays of a `mpishard.data.Samples`: a dict as keyword arguments, a tuple as positional
        arguments. Each rank makes a module of its own.
    loss : callable or ILossFunction
        ``loss(output, y)`` returns a scalar tensor, the *mean* over samples, as
        ``torch.nn.functional.mse_loss`` does. Or a loss of `mpishard.nn`.
    loss_is_sum : bool
        True if the loss is the *sum* over the samples. Then gradients are added over ranks, and not
        averaged, as those of one process with all samples.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    TypeError
        If an argument is another one, or a parameter is not a plain strided tensor.
    ValueError
        If ``loss_is_sum`` is given with a loss of `mpishard.nn`, which is a mean. If the trained
        parameters are not all float32 (complex64) or all float64 (complex128), or a tensor is not
        on the CPU. Nothing has changed then.
    ShardingError
        If the module is sharded already.
    """

    def __init__(
        self,
        module: Any,
        loss: Callable[[Any, Any], Any] | ILossFunction,
        *,
        loss_is_sum: bool = False,
    ) -> None:
        optional_package("torch", "TorchModel", "torch")
        if not isinstance(loss, ILossFunction) and not callable(loss):
            raise TypeError("loss must be loss(output, y), or a loss of mpishard.nn")
        if isinstance(loss, ILossFunction) and loss_is_sum:
            raise ValueError(
                f"loss_is_sum is for a function loss(output, y); {type(loss).__name__} is a mean"
            )
        if not isinstance(loss, ILossFunction):
            loss = TorchLoss(loss, loss_is_sum=loss_is_sum)
        self._loss = loss
        self._hold(module)
        self._name = type(module).__name__
        self._dtype = self._placed.dtype
        vector = np.empty(self.parameter_count, self._dtype)
        self.fill_parameters(0, vector)
        self.reclaim_parameters(vector)

    def _hold(self, module: Any) -> None:
        from mpishard.torch.placed import PlacedModule

        self._placed = PlacedModule(module)
        self._module, self._entries = module, self._placed.entries

    # ---------------------------------------------------------------------------------- structure

    @property
    def module(self) -> Any:
        """The PyTorch module, which may be called at any time."""
        return self._module

    @property
    def placed_object(self) -> Any:
        return self._module

    @property
    def default_loss_function(self) -> ILossFunction:
        return self._loss

    # --------------------------------------------------------------------------------- parameters

    def with_parameters(self, parameters: Array) -> Self:
        """Return a new plain model of this structure that uses ``parameters`` without a copy.

        The array is copied only if its dtype differs, or if it is not C-contiguous.
        """
        import torch

        from mpishard.torch.complex_parameters import from_real_numbers

        parameters = self._checked(parameters)
        model = copy.copy(self)
        # deepcopy takes objects from its memo. With the new parameters there, it copies only
        # buffers and other state.
        memo = {}
        for old, numbers in zip(self._placed.parameters, self._cut(parameters), strict=True):
            values = from_real_numbers(
                torch.from_numpy(numbers), old.shape, is_complex=old.is_complex()
            )
            memo[id(old)] = torch.nn.Parameter(values, old.requires_grad)
        model._hold(copy.deepcopy(self._module, memo))
        model.reclaim_parameters(parameters)
        return model

    def _checked(self, vector: Array) -> Array:
        vector = super()._checked(vector)
        # An array that begins inside of another one may not be aligned for complex parameters.
        is_odd = vector.ctypes.data % (2 * vector.itemsize) > 0
        has_complex = any(parameter.is_complex() for parameter in self._placed.parameters)
        return vector.copy() if is_odd and has_complex else vector

    def fill_parameters(self, start: int, out: Array) -> None:
        if self._holder is not None:
            self._flat_vector()  # This raises the error that names the holder.
        self._placed.fill(start, out)

    def obstacle_to_bfloat16(self) -> str | None:
        """Return None, or refuse parameters as `mpishard.torch.shard` does, by a ValueError."""
        self._placed.require_roundable()
        return None

    def place_parameters(self, arrays: Sequence[Array], holder: str, store: ParameterStore) -> None:
        from mpishard.torch.parameters import StoredParameter
        from mpishard.torch.world import prepare_torch

        super().place_parameters(arrays, holder, store)
        self._placed.hold(store.layout.units, functools.partial(StoredParameter, holder, store))
        self._placed.normalise_over(store.backend)
        prepare_torch()

    def reclaim_parameters(self, parameters: Array) -> None:
        super().reclaim_parameters(parameters)
        self._placed.normalise_over(None)

    def _place(self, arrays: Sequence[Array]) -> None:
        from mpishard.torch.placed import tensor_of

        for index, array in enumerate(arrays):
            self._placed.place(index, tensor_of(array))

    # ------------------------------------------------------------------------- beside parameters

    def distribute_state(self, world: CommunicationBackend, ranks: CommunicationBackend) -> None:
        self._placed.distribute(world, ranks)

    def share_changed_state(self, ranks: CommunicationBackend) -> bool:
        """Take the buffers that rank 0's passes have changed. Collective.

        Raises
        ------
        ShardingError
            As `Buffers.broadcast`.
        """
        return self._placed.buffers.share_changed_state(ranks)

    def kept_state(self) -> object:
        return self._placed.buffers.copies()

    def restore_state(self, kept: Any) -> None:
        self._placed.buffers.restore(kept)

    @property
    def may_use_some(self) -> bool:
        return True

    @property
    def computes_together(self) -> bool:
        return self._placed.computes_together

    def choices(self) -> Document:
        """Return the state of the module beside the flat vector, which training may change."""
        from mpishard.torch.beside import saved_state, to_text

        state = saved_state(self._placed)
        return {_BESIDE: to_text(state)} if state else {}

    def check_choices(self, choices: Metadata) -> None:
        """Refuse state that the module does not have, naming one value."""
        from mpishard.torch.beside import check_state

        super().check_choices({n: choices[n] for n in choices if n not in (_BESIDE, _BUFFERS)})
        check_state(self._placed, _beside_in(choices))

    def take_choices(self, choices: Metadata) -> None:
        """Restore the state of `choices`; without any, the module keeps its state."""
        from mpishard.torch.beside import take_state

        take_state(self._placed, _beside_in(choices))

    # ---------------------------------------------------------------------------------- computing

    def check_input(self, x: Any) -> None:
        _check_array(x)

    def predict(self, x: Array) -> Array:
        """Return outputs in eval mode, shape (B, ...), for inputs of shape (B, ...)."""
        import torch

        _check_array(x)
        # Each submodule has a mode of its own, which train() would set for all of them.
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                return self._run(x)[1]
        finally:
            for module, mode in modes:
                module.training = mode

    def _run(self, x: Array) -> tuple[Any, Array]:
        """Return the module's output as a tensor and as an array.

        Both have the same memory, unless the tensor is bfloat16.
        """
        import torch

        from mpishard.torch.placed import note_wide_buffers, rounded

        convert = functools.partial(_tensor, dtype=self._dtype)
        tree = x.map(convert) if isinstance(x, Samples) else [convert(x)]
        # A sharded wrapper may have placed rounded parameters.
        is_rounded = self._placed.parameters[0].dtype == torch.bfloat16
        tree = rounded(tree) if is_rounded else tree
        try:
            output = self._module(**tree) if isinstance(tree, dict) else self._module(*tree)
        except RuntimeError as error:
            if is_rounded:
                note_wide_buffers(error, self._module)
            raise
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{type(self._module).__name__} must return one tensor, got "
                f"{type(output).__name__}; give TorchModel a module whose forward picks one"
            )
        if output.is_complex():
            raise TypeError(
                f"{type(self._module).__name__} must return real numbers, and returns "
                f"{output.dtype}: let forward return output.abs(), output.real or "
                "torch.view_as_real(output)"
            )
        return output, output.detach().to(getattr(torch, self._dtype.name)).numpy()

    def forward_pass(
        self, x: Array, y: Array, loss: ILossFunction | None, context: Context
    ) -> tuple[Scalar, Scalar, Saved]:
        import torch

        assert loss is not None
        self._placed.require_placed()
        # The caller may have disabled gradients, for instance in an evaluation.
        with torch.enable_grad():
            output, prediction = self._run(x)
        total, weight, saved = loss.forward(prediction, y)
        return total, weight, (output, loss, saved)

    def backward_pass(self, kept: Any, receive: Callable[[int, Array], None]) -> None:
        import torch

        output, loss, saved = kept
        if not output.requires_grad:  # The module used no parameter.
            return
        handles = []
        try:
            for index, parameter in enumerate(self._placed.parameters):
                parameter.grad = None
                if parameter.requires_grad:
                    take = functools.partial(_hand_over, receive, index)
                    handles.append(self._placed.hook(index, take))
            output.backward(torch.from_numpy(loss.backward(saved)).to(output.dtype))
        finally:
            for handle in handles:
                handle.remove()
            # After an error, a gradient that is left would be added to that of the next pass.
            for parameter in self._placed.parameters:
                parameter.grad = None


def _hand_over(receive: Callable[[int, Array], None], index: int, gradient: Any) -> None:
    if gradient is not None:
        receive(index, gradient.numpy().reshape(-1))


def _beside_in(choices: Metadata) -> Document:
    from mpishard.torch.beside import from_text

    if _BUFFERS in choices:
        return {"state_dict": from_text(choices[_BUFFERS]), "versions": {}}
    return from_text(choices[_BESIDE]) if _BESIDE in choices else {}


class TorchLoss(ILossFunction):
    """Loss of a PyTorch ``function(output, target)``, which returns a scalar, the samples' mean.

    With ``loss_is_sum`` it returns their sum.
    """

    def __init__(self, function: Callable[[Any, Any], Any], *, loss_is_sum: bool = False) -> None:
        self._function = function
        self.is_sum = loss_is_sum

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Saved]:
        import torch

        samples = len(prediction)
        # PyTorch's mean of no sample is NaN.
        if samples == 0:
            return 0.0, 0.0, (None, None, np.zeros_like(prediction))
        output = torch.from_numpy(prediction)
        with torch.set_grad_enabled(training):
            output.requires_grad_(training)
            convert = functools.partial(_tensor, dtype=prediction.dtype)
            given = target.map(convert) if isinstance(target, Samples) else convert(target)
            value = self._function(output, given)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else value
            raise TypeError(
                f"loss(output, y) must return a scalar tensor, the mean over samples; got {shape}"
            )
        factor = 1 if self.is_sum else samples
        return float(value.detach()) * factor, float(samples), (output, value * factor, None)

    def backward(self, saved: Saved) -> Array:
        import torch

        zeros: Array
        output, total, zeros = saved
        if output is None:
            return zeros
        # Not backward(), which would also add to gradients of parameters that the loss has.
        gradient: Array = torch.autograd.grad(total, output)[0].numpy()
        return gradient


def _tensor(array: Array, dtype: DType) -> Any:
    """Return ``array`` as a tensor, if possible in the same memory.

    Floating-point arrays are converted to ``dtype``, integers to int64. Read-only arrays, which
    PyTorch does not support, are copied.
    """
    import torch

    if array.dtype.kind == "f":
        array = array.astype(dtype, copy=False)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _check_array(x: Any) -> None:
    for leaf in x.leaves() if isinstance(x, Samples) else [x]:
        require_plain(leaf)
        if not isinstance(leaf, np.ndarray) or leaf.ndim == 0 or leaf.dtype.kind not in "fiub":
            shown = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(
                f"x must be a NumPy array of samples: floats, integers or bools; got {shown}; "
                "mpishard.data.Samples holds several"
            )
