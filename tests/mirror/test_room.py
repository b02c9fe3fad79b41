"""The room: what it offers, what native classes are without it, and when its modules are loaded."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import mpishard as ms
from mpishard import mirror
from mpishard.base import mirrored

ROOT = Path(__file__).parents[2]


def run(program: str) -> str:
    """What a new process prints."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        # One thread: Python warns if a process of several is forked.
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_name_of_the_room_is_there_and_documented() -> None:
    tree = ast.parse(inspect.getsource(mirror))
    conditions = {ast.unparse(node.test): node for node in tree.body if isinstance(node, ast.If)}
    imports = [n for n in conditions["TYPE_CHECKING"].body if isinstance(n, ast.ImportFrom)]
    assert sorted(alias.name for node in imports for alias in node.names) == mirror.__all__
    for node in imports:
        for alias in node.names:
            value = getattr(mirror, alias.name)
            assert value is getattr(importlib.import_module(str(node.module)), alias.name)
            assert inspect.getdoc(value), alias.name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        mirror.nonsense  # noqa: B018


def test_the_seam_names_the_classes_that_the_room_offers() -> None:
    offered = [name for names in mirror._MEMBERS.values() for name in names]
    assert sorted(offered) == mirrored.__all__
    for name in offered:
        assert getattr(mirrored, name).__module__.startswith("mpishard.mirror.members.")


@pytest.mark.spawned
def test_native_classes_train_without_the_room() -> None:
    """No native code needs a documented member."""
    program = """
import sys
import mpishard as ms
from mpishard.base import mirrored
mirrored._modules.clear()  # nothing is offered
import numpy as np
def main(backend):
    x, y = np.ones((4, 3)), np.ones((4, 2))
    model = ms.as_distributed(ms.nn.MLP([3, 4, 2]), backend)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend)
    before = optimizer.step(model, x, y)
    data = ms.OptimizationInputData(model=model, x_train=x, y_train=y, epochs=3, progress=False)
    optimizer.optimize(data)
    return before > model.evaluate(x, y)[0]
print(ms.run_in_threads(2, main), [name for name in sys.modules if ".mirror.members" in name])
"""
    assert run(program) == "[True, True] []\n"


@pytest.mark.spawned
def test_each_module_can_be_the_first_that_a_process_loads() -> None:
    names = [*mirror._MODULES, *(f"members.{name}" for name in mirror._MEMBERS)]
    program = f"""
import importlib, os
import numpy  # once for all
import mpishard
for name in {names}:
    if os.fork() == 0:
        importlib.import_module(f"mpishard.mirror.{{name}}")
        os.write(1, f"{{name}} {{mpishard.FSDPModel.__name__}}\\n".encode())
        os._exit(0)
    os.wait()
"""
    assert run(program).splitlines() == [f"{name} FSDPModel" for name in names]


def native_names(kind: type) -> set[str]:
    """The public names that a class and the native ones among its bases define."""
    natives = [
        base
        for base in kind.__mro__
        if base.__module__.startswith("mpishard.") and ".mirror." not in base.__module__
    ]
    assert len(natives) <= 3
    return {name for base in natives for name in vars(base) if not name.startswith("_")}


def test_a_reader_of_a_native_class_sees_what_it_does() -> None:
    assert len(native_names(ms.FSDPModel)) <= 40
    assert len(native_names(ms.optimizers.AdamW)) <= 24


@pytest.mark.parametrize(
    "kind",
    [ms.FSDPModel, ms.HybridShardedModel, ms.FSDPOptimizer, ms.optimizers.AdamW, ms.nn.MLP,
     ms.FunctionModel, ms.ShardingConfiguration],
)  # fmt: skip
def test_every_member_that_users_see_is_documented(kind: type) -> None:
    members = {name: inspect.getattr_static(kind, name) for name in dir(kind) if name[0] != "_"}
    functions = property | classmethod | staticmethod | FunctionType
    shown = [name for name, member in members.items() if isinstance(member, functions)]
    assert [name for name in shown if not inspect.getdoc(getattr(kind, name))] == []


def test_classes_are_what_the_interfaces_say() -> None:
    for kind in (ms.FSDPModel, ms.HybridShardedModel):
        assert issubclass(kind, mirror.IShardedModel)
        assert issubclass(kind, mirror.IFullModel)
        assert issubclass(kind, mirror.ICheckpointableModel)
    assert issubclass(ms.optimizers.AdamW, mirror.IGradientBasedOptimizer)
    assert issubclass(ms.optimizers.AdamW, mirror.IModelSerializer)
    assert issubclass(ms.FSDPOptimizer, mirror.IShardedOptimizer)
    assert not issubclass(ms.FSDPOptimizer, mirror.IGradientBasedOptimizer)
    assert issubclass(ms.nn.GPT, mirror.IPipelineDecomposableModel)
    assert issubclass(ms.FunctionModel, mirror.IFullModel)


def test_spellings_are_other_names_of_the_same_members() -> None:
    assert ms.ReductionOperation["Sum"] is ms.ReductionOperation.Sum is ms.ReductionOperation.SUM
    assert len(ms.ReductionOperation) == 5
    kinds = ms.pipeline.PipelineOperationType
    assert kinds("backward_input") is kinds.BackwardInput is kinds.BACKWARD_INPUT
    categories = ms.contracts.LayerCategory
    assert all(categories[member.name.capitalize()] is member for member in categories)
