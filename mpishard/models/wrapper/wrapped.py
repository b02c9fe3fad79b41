"""What a sharded model passes on to the model that it wraps."""

from __future__ import annotations

import json
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.checkpoint.format.consensus import gather_texts, share_text
from mpishard.contracts import (
    DynamicShapeInfo,
    IFeatureImportance,
    IFullModel,
    ILossFunction,
    ModelMetadata,
)
from mpishard.errors import MissingInterfaceError, MissingMemberError
from mpishard.models.engine.engine import Engine
from mpishard.nn import GPT, KeyValueCache, generate

__all__ = ["WrappedMembers"]


class WrappedMembers(IFullModel):
    """Members whose answer is the wrapped model's; a black box need not have them."""

    @property
    @abstractmethod
    def wrapped_model(self) -> Any:
        """The user's model."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The one way in which the parameters change."""

    @abstractmethod
    def unsharded(self, root: int | None = None) -> AbstractContextManager[Any]:
        """The plain model with all parameters. Collective."""

    @property
    def default_loss_function(self) -> ILossFunction | None:
        return getattr(self.wrapped_model, "default_loss_function", None)

    def sanitize_parameters(self, parameters: Array) -> Array:
        sanitize = getattr(self.wrapped_model, "sanitize_parameters", None)
        return parameters if sanitize is None else sanitize(parameters)

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield the parameters unit by unit, so that none but one is whole. Collective.

        On a mesh, where a rank's units are of its own parameters, all come at once.
        """
        if self.engine.replica.is_on_mesh:
            yield self.engine.gather()
            return
        store = self.engine.parameters
        for unit in self.engine.program.units:
            try:
                chunk = store.unshard(unit).copy()
            finally:
                store.reshard(unit)
            yield chunk

    # ------------------------------------------------------------------------------------ shapes

    def get_input_shape(self) -> list[int]:
        shape: list[int] = self._ask("get_input_shape", [])
        return shape

    def get_output_shape(self) -> list[int]:
        shape: list[int] = self._ask("get_output_shape", [])
        return shape

    def get_dynamic_shape_info(self) -> DynamicShapeInfo:
        info: DynamicShapeInfo = self._ask("get_dynamic_shape_info", DynamicShapeInfo())
        return info

    def _ask(self, name: str, otherwise: Any) -> Any:
        member = getattr(self.wrapped_model, name, None)
        return otherwise if member is None else member()

    # ---------------------------------------------------------------------------------- features

    def get_active_feature_indices(self) -> Iterable[int]:
        indices: Iterable[int] = self._feature_member("get_active_feature_indices")()
        return indices

    def set_active_feature_indices(self, indices: Iterable[int]) -> None:
        """Use these features and no others. Collective.

        Raises
        ------
        MissingInterfaceError
            Where the wrapped model is not aware of its features.
        ValueError
            For an index that is none, before anything is communicated; where the ranks name
            different features, on every rank. Nothing has changed then.
        """
        set_indices = self._feature_member("set_active_feature_indices")
        before = list(self.get_active_feature_indices())
        set_indices(indices)
        mine = sorted(int(index) for index in self.get_active_feature_indices())
        texts = gather_texts(self.engine.world, json.dumps(mine))
        differs = any(text != texts[0] for text in texts)
        found = share_text(self.engine.world, "; ".join(texts) if differs else "")
        if found:
            set_indices(before)
            raise ValueError(f"every rank must name the same features; by rank, {found}")

    def is_feature_used(self, index: int) -> bool:
        return bool(self._feature_member("is_feature_used")(index))

    def get_feature_importance(self) -> dict[str, float]:
        """Importance by feature name. Collective."""
        self._feature_member("get_feature_importance", "IFeatureImportance")
        with self.unsharded() as model:
            importance: dict[str, float] = model.get_feature_importance()
        return importance

    def _feature_member(self, name: str, interface: str = "IFeatureAware") -> Any:
        member = getattr(self.wrapped_model, name, None)
        # A class that inherits the interface's own does not implement it, and says so only when
        # it is called: after the parameters have been gathered for it.
        given = getattr(type(self.wrapped_model), name, None)
        if member is None or given is IFeatureImportance.__dict__.get(name, member):
            raise MissingInterfaceError(
                f"{type(self.wrapped_model).__name__} does not implement {interface}"
            )
        return member

    # -------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompt: Any,
        length: int,
        temperature: float = 1.0,
        seed: int = 0,
        top_k: int | None = None,
        slide: int = 1,
    ) -> np.ndarray[Any, Any]:
        """Continue a sequence of tokens, as `mpishard.nn.GPT.generate`. Collective.

        Every rank passes the same arguments and gets the same tokens. Keys and values are kept
        where they are computed: under tensor parallelism each rank keeps those of its heads, of
        a pipeline those of its layers.

        Raises
        ------
        MissingMemberError
            Where the model has no ``generate``.
        ValueError
            As `mpishard.nn.generate`; on every rank where the arguments differ between ranks.
        """
        model = self.wrapped_model
        if not isinstance(model, GPT):
            raise MissingMemberError(f"{type(model).__name__} has no generate")
        arguments = (list(np.asarray(prompt).ravel()), length, temperature, seed, top_k, slide)
        marks = self.engine.world.all_gather(np.array([zlib.crc32(repr(arguments).encode())]))
        if (marks != marks[0]).any():
            raise ValueError(
                f"generate: the arguments differ between ranks (checksums {marks.tolist()}); every "
                "rank must pass the same"
            )

        def logits(tokens: np.ndarray[Any, Any], cache: KeyValueCache) -> Array:
            return self.engine.predict_next(tokens, cache)[0]

        return generate(
            logits, prompt, length, vocabulary_size=model.vocabulary_size,
            context_length=model.context_length, temperature=temperature, seed=seed, top_k=top_k,
            slide=slide,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------- graphs

    @property
    def supports_jit_compilation(self) -> bool:
        return bool(getattr(self.wrapped_model, "supports_jit_compilation", False))

    def export_computation_graph(self, input_nodes: list[Any]) -> Any:
        """The graph of the plain model, with the parameters of now in it. Collective."""
        if input_nodes is None:
            raise TypeError("input_nodes must be a list, got None")
        if not self.supports_jit_compilation:
            raise MissingMemberError(
                f"{type(self.wrapped_model).__name__} does not implement IJitCompilable: it has no "
                "computation graph to export"
            )
        with self.unsharded() as model:
            return model.export_computation_graph(input_nodes)

    # ----------------------------------------------------------------------------------- metadata

    def get_model_metadata(self) -> ModelMetadata:
        """What the wrapped model says about itself."""
        name = type(self.wrapped_model).__name__
        return self._ask("get_model_metadata", None) or ModelMetadata(name, model_type=name)
