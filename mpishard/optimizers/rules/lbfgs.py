"""L-BFGS, the rule that searches along a direction.

It needs the loss and its gradient at several points for each update, and therefore full batches.
The caller asks the rule to `begin` an update, and then to judge each evaluation, until its numbers
have none pending. All vectors are cut as the parameters are. A dot product is a sum over the ranks'
parts in the one tree, so that all ranks choose the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from mpishard.base import Array, array_namespace, as_count, is_device_array, to_host
from mpishard.optimizers.rules.pieces import PieceViews, UpdateContext, rows_of
from mpishard.optimizers.rules.rule import JointRule, fraction
from mpishard.optimizers.rules.schedules import Schedule
from mpishard.optimizers.rules.strong_wolfe import StrongWolfe
from mpishard.sharding import refuse_line_search

_BLOCK = 4096  # elements whose products are summed as one; a power of two, the same everywhere
_LONGEST = 1e10  # of all steps
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(eq=False)
class LBFGS(JointRule):
    """Limited-memory BFGS with a strong Wolfe line search, for full batches.

    Nocedal and Wright, "Numerical Optimization", 2006, algorithms 7.4 and 7.5. The inverse Hessian
    is that of the last ``memory`` pairs of steps and changes of the gradient, on gamma times the
    identity (equation 7.20). The two loops go through the coefficients of the pairs, after one
    reduction of all dot products (Chen, Wang and Zhou, "Large-scale L-BFGS using MapReduce", NIPS
    2014). So an update needs as many reductions with 20 pairs as with one. Constants and first
    steps are those of SciPy's L-BFGS-B, whose iterates it follows.

    One ``step`` evaluates the loss as often as its line search needs, mostly once, and returns the
    loss before the update. All evaluations of a run must be of one function: `optimize` refuses a
    ``batch_size`` below the number of samples, and models with dropout are refused. `minimize` runs
    it on a function.

    Weight decay and clipping would make the gradient that of another function than the loss, so
    they are refused.

    Parameters
    ----------
    learning_rate : float or Schedule
        First trial of a search, in units of the quasi-Newton step; 1 is right for most problems.
    memory : int
        Number m of pairs; state is 2m + 3 vectors of the parameters' length, over all ranks.
    c1, c2 : float
        Constants of the strong Wolfe conditions, 0 < c1 < c2 < 1.
    max_line_search : int
        Evaluations after which a search is given up; the next begins along the gradient.
    parameter_options
        See `Optimizer`; ``frozen`` alone.

    Raises
    ------
    ValueError
        For a number outside its range, weight decay or clipping.
    """

    # The caller keeps `context.numbers`: the value at the base point, the search under way, the
    # number of evaluations, and "stuck", the reason if no lower value can be found.

    learning_rate: float | Schedule = 1.0
    c1: float = 1e-3
    c2: float = 0.9
    max_line_search: int = 20
    memory: int = 10

    searches = True
    state_names: ClassVar[tuple[str, ...]] = ("base", "base_gradient", "direction")
    updates_unused = True
    checks = JointRule.checks | {
        "c1": fraction,
        "c2": fraction,
        "max_line_search": as_count,
        "memory": as_count,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_bounded = False  # `minimize` fills the state "lower" and "upper" if it is
        if not 0 < self.c1 < self.c2:
            raise ValueError(f"a line search needs 0 < c1 < c2 < 1, got {self.c1} and {self.c2}")
        given = [n for n in ("clip_global_norm", "clip_value", "weight_decay") if getattr(self, n)]
        options = [p for p, values in self.checked_options.items() if values.keys() - {"frozen"}]
        if given or options:
            other = ", ".join(given) or f"parameter_options[{options[0]!r}]"
            refuse_line_search(
                type(self).__name__,
                f"{other} changes only the gradient",
                "add a penalty to the loss. parameter_options may only freeze",
            )

    def needed_state(self) -> tuple[str, ...]:
        numbers = range(self.memory)
        bounds = ("lower", "upper") if self.is_bounded else ()
        pairs = [*(f"step{k}" for k in numbers), *(f"change{k}" for k in numbers)]
        return (*self.state_names, *bounds, *pairs)

    # ------------------------------------------------------------------------------- an update

    def begin(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Choose a direction, and move the parameters to the first trial. Collective.

        Nothing is done before the first evaluation, which is at the initial parameters.
        """
        numbers = context.numbers
        if "value" not in numbers:
            numbers["pending"] = True
            return
        numbers.pop("stuck", None)
        self._choose_direction(pieces, context)

    def _search(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Search along the direction that is chosen. Collective."""
        numbers = context.numbers
        slope, square = self._slope(pieces, context)
        if not (slope < 0 and math.isfinite(square)):
            self._give_up(pieces, context)
            return
        # A direction within bounds ends at the box with a step of 1.
        longest = 1.0 if self.is_bounded else _LONGEST
        # The gradient alone has no scale: the first trial is then one unit long, as in SciPy.
        first = context.learning_rate if numbers.get("pairs") else 1.0 / math.sqrt(square)
        step = min(first, longest)
        search = StrongWolfe(numbers["value"], slope, step, longest, self.c1, self.c2)
        numbers["search"], numbers["pending"] = asdict(search), True
        self._place(pieces, step)

    def update_all(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Judge an evaluation: keep its point, or move the parameters to the next. Collective."""
        numbers = context.numbers
        if context.loss is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs the loss at several points for its line search: use "
                "optimize, a sharded optimizer's step, or mpishard.minimize"
            )
        numbers["evaluations"] = numbers.get("evaluations", 0) + 1
        if "value" not in numbers:
            # The first evaluation: the initial parameters become the base of the first search.
            numbers["value"] = context.loss
            for owned in pieces:
                self._rebase(owned, context.gradient_scale)
            self.begin(pieces, context)
            return
        scale = context.gradient_scale
        # A trial is judged by its value and by its slope along the direction.
        (slope,) = self._sums(
            pieces,
            context,
            ["direction"],
            lambda views: [scale * _dot(views["gradient"], views["direction"])],
        )
        self._judge(pieces, context, context.loss, slope)

    def reject(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Judge an evaluation whose loss or gradient is not finite. Collective."""
        context.numbers["evaluations"] += 1
        # The search treats an infinite loss as a step that is too long, and goes back.
        self._judge(pieces, context, math.inf, math.nan)

    def _judge(
        self, pieces: Sequence[PieceViews], context: UpdateContext, value: float, slope: float
    ) -> None:
        numbers = context.numbers
        # Made of JSON for each evaluation, so that a checkpoint can hold a search under way.
        search = StrongWolfe(**numbers["search"])
        tried = search.step
        if search.judge(value, slope):
            self._accept(pieces, context, tried * (slope - search.slope), -tried * search.slope)
            numbers.update(pending=False, search=None, before=numbers["value"], value=value)
        elif search.is_exhausted or search.trials >= self.max_line_search:
            self._give_up(pieces, context)
        else:
            numbers["search"] = asdict(search)
            self._place(pieces, search.step)

    def _give_up(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Go back, and begin again along the gradient; if that was tried, record "stuck"."""
        context.numbers.update(pending=False, search=None)
        self._place(pieces, 0.0)
        # A bad direction may come from old curvature; the gradient depends on none.
        if context.numbers.get("pairs"):
            context.numbers["pairs"] = []
            self._choose_direction(pieces, context)
        else:
            context.numbers["stuck"] = "no step along the gradient lowers the loss enough"

    # ---------------------------------------------------------------------------- the direction

    def _accept(
        self, pieces: Sequence[PieceViews], context: UpdateContext, product: float, scale: float
    ) -> None:
        """Make the present point the base, and keep the step to it. Collective.

        ``product`` is step times change of gradient, and ``scale`` step times gradient.
        """
        pairs = context.numbers.setdefault("pairs", [])
        is_kept = product > _EPSILON * scale  # otherwise the matrix would not stay positive
        slot = 0
        if is_kept:
            # The oldest pair's vectors are overwritten: no memory is allocated in a step.
            slot = len(pairs) if len(pairs) < self.memory else pairs.pop(0)
            pairs.append(slot)
        for owned in pieces:
            # Written in place: the vectors of a pair are parts of the state that checkpoints save.
            state, xp = owned.state, array_namespace(owned.parameters)
            if is_kept:
                xp.subtract(owned.parameters, state["base"], out=state[f"step{slot}"])
                change = state[f"change{slot}"]
                xp.multiply(owned.gradients, context.gradient_scale, out=change)
                change -= state["base_gradient"]
            self._rebase(owned, context.gradient_scale)

    def _choose_direction(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Write ``state["direction"]``, and search along it. Collective."""
        pairs = context.numbers.get("pairs", [])
        names = [*(f"step{k}" for k in pairs), *(f"change{k}" for k in pairs), "base_gradient"]
        vectors = [*names, *(("base", "lower", "upper") if self.is_bounded else ())]
        size = len(names)
        upper = np.triu_indices(size)

        def products(views: Mapping[str, Array]) -> Array:
            rows = self._free_rows(views, names)
            return (rows @ rows.T)[upper]

        coefficients = np.zeros(size)
        # Without pairs the direction is the negative gradient.
        coefficients[-1] = -1.0
        if pairs:
            gram = np.zeros((size, size))
            # All dot products in one reduction: both loops then run on these numbers alone.
            gram[upper] = self._sums(pieces, context, vectors, products, len(upper[0]))
            # The matrix is symmetric, so that only one triangle travels.
            gram.T[upper] = gram[upper]
            coefficients = _two_loops(gram, len(pairs))
        for owned in pieces:
            # By segments, because a product's bits depend on its length: with gradient_leaves
            # they are cut alike in every world.
            for segment in owned.segments:
                for views in _blocks(owned, ["direction", *vectors], segment.start, segment.stop):
                    rows = self._free_rows(views, names)
                    xp = array_namespace(rows)
                    found = xp.asarray(coefficients) @ rows
                    if self.is_bounded:
                        # Cut off where a step of 1 would leave the box.
                        found += views["base"]
                        xp.clip(found, views["lower"], views["upper"], out=found)
                        found -= views["base"]
                    views["direction"][...] = found
        if self.is_bounded and pairs and not self._slope(pieces, context)[0] < 0:
            context.numbers["pairs"] = []  # the projected direction does not lead down
            self._choose_direction(pieces, context)
            return
        self._search(pieces, context)

    def _free_rows(self, views: Mapping[str, Array], names: Sequence[str]) -> Array:
        """Return vectors as rows in float64, with 0 where the bounds hold the parameter."""
        xp = array_namespace(views[names[0]])
        rows = xp.stack([views[name] for name in names]).astype(np.float64, copy=False)
        if self.is_bounded:
            base, gradient = views["base"], views["base_gradient"]
            rows *= ~(
                ((base <= views["lower"]) & (gradient > 0))
                | ((base >= views["upper"]) & (gradient < 0))
            )
        return rows

    # ---------------------------------------------------------------------------- arithmetic

    def _rebase(self, owned: PieceViews, scale: float) -> None:
        xp = array_namespace(owned.parameters)
        owned.state["base"][...] = owned.parameters
        xp.multiply(owned.gradients, scale, out=owned.state["base_gradient"])

    def _place(self, pieces: Sequence[PieceViews], step: float) -> None:
        """Move the parameters to the base plus ``step`` times the direction."""
        for owned in pieces:
            p, xp = owned.parameters, array_namespace(owned.parameters)
            if step == 0:  # exactly, also if the direction is not finite
                p[...] = owned.state["base"]
                continue
            xp.multiply(owned.state["direction"], step, out=p)
            p += owned.state["base"]
            if self.is_bounded:  # rounding may leave the box
                xp.clip(p, owned.state["lower"], owned.state["upper"], out=p)

    def _slope(self, pieces: Sequence[PieceViews], context: UpdateContext) -> list[float]:
        """Return the slope along the direction, and the square of its length. Collective."""

        def products(views: Mapping[str, Array]) -> list[float]:
            direction = views["direction"]
            return [_dot(views["base_gradient"], direction), _dot(direction, direction)]

        return self._sums(pieces, context, ["base_gradient", "direction"], products, 2)

    def _sums(
        self,
        pieces: Sequence[PieceViews],
        context: UpdateContext,
        names: Sequence[str],
        products: Callable[[Mapping[str, Array]], Sequence[float] | Array],
        width: int = 1,
    ) -> list[float]:
        """Return sums over all elements of all ranks, the same on every rank. Collective.

        ``products`` returns the ``width`` sums over a block, of whose vectors it gets views by
        name: "gradient" and those of the state that ``names`` lists.
        """
        numbers = rows_of(pieces, context)
        # Each parameter has a row: some ranks of a mesh hold copies, which are counted once.
        rows: Array = np.zeros((len(numbers), width))
        for owned in pieces:
            for segment in owned.segments:
                row = numbers[segment.name, segment.number]
                for views in _blocks(owned, names, segment.start, segment.stop):
                    rows[row] += to_host(array_namespace(owned.parameters).asarray(products(views)))
        rows = context.sum_over_owners(rows)
        firsts = [row for (_, number), row in numbers.items() if number == 0]
        total: list[float] = rows[firsts].sum(axis=0).tolist()
        return total


def _two_loops(gram: Array, count: int) -> Array:
    """Return the coefficients of steps, changes and gradient in the direction.

    ``gram`` are all dot products of these vectors, the oldest pair first; the loops are those of
    algorithm 7.4.
    """
    found = np.zeros(2 * count + 1)
    found[-1] = -1.0
    # A pair may have no curvature among the parameters that no bound holds: it cannot be a divisor.
    usable = [k for k in range(count) if gram[k, count + k] > _EPSILON * gram[count + k, count + k]]
    alphas = {}
    for k in reversed(usable):
        alphas[k] = gram[k] @ found / gram[k, count + k]
        found[count + k] -= alphas[k]
    if usable:
        last = usable[-1]
        found *= gram[last, count + last] / gram[count + last, count + last]
    for k in usable:
        found[k] += alphas[k] - gram[count + k] @ found / gram[k, count + k]
    return found


def _dot(a: Array, b: Array) -> float:
    """Return the dot product in float64."""
    return float(a.astype(np.float64, copy=False) @ b.astype(np.float64, copy=False))


def _blocks(
    owned: PieceViews, names: Sequence[str], start: int, stop: int
) -> Iterator[dict[str, Array]]:
    """Yield views of the vectors, block by block; on a GPU all is one block."""
    vectors = {name: owned.state[name] for name in names}
    vectors["gradient"] = owned.gradients
    step = max(1, stop - start) if is_device_array(owned.parameters) else _BLOCK
    for begin in range(start, stop, step):
        end = min(stop, begin + step)
        yield {name: vector[begin:end] for name, vector in vectors.items()}
