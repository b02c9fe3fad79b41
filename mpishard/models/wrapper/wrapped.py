"""Members of the user's own model, and arguments of collective calls that ranks must share."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpishard.base import Array, MissingInterfaceError, MissingMemberError, array_namespace, to_host
from mpishard.communication import CommunicationBackend, gather_texts, share_text
from mpishard.contracts import IFeatureImportance, ILayeredModel, UserModel
from mpishard.models.engine.engine import Engine
from mpishard.nn import GPT, generate


def holding(model: UserModel, parameters: Array) -> Any:
    """Return a plain model with the structure of ``model`` and these ``parameters``."""
    if hasattr(model, "with_parameters"):
        return model.with_parameters(parameters)
    # A copy: the wrapped model itself must stay without parameters.
    model = copy.deepcopy(model)
    if isinstance(model, ILayeredModel):
        model.reclaim_parameters(parameters)
    else:
        model.set_parameters(parameters)
    return model


def feature_member(model: object, name: str, interface: str = "IFeatureAware") -> Any:
    """Return a member of ``interface``.

    Raises
    ------
    MissingInterfaceError
        If the model does not implement it.
    """
    member = getattr(model, name, None)
    # A class that only inherits the interface's method does not implement it, and would raise only
    # when called: after the parameters have been gathered for the call.
    given = getattr(type(model), name, None)
    if member is None or given is IFeatureImportance.__dict__.get(name, member):
        raise MissingInterfaceError(f"{type(model).__name__} does not implement {interface}")
    return member


def use_features(model: object, indices: Iterable[int], world: CommunicationBackend) -> None:
    """Use these features and no others; refuse choices that differ between ranks. Collective."""
    set_indices = feature_member(model, "set_active_feature_indices")
    get_indices = feature_member(model, "get_active_feature_indices")
    # Set first and compared afterwards: only the model knows which indices it accepts.
    before = list(get_indices())
    set_indices(indices)
    # Sorted, because the order in which a user names features has no effect.
    texts = gather_texts(world, json.dumps(sorted(int(index) for index in get_indices())))
    differs = any(text != texts[0] for text in texts)
    found = share_text(world, "; ".join(texts) if differs else "")
    if found:
        set_indices(before)
        raise ValueError(f"every rank must name the same features; by rank, {found}")


def generate_tokens(
    engine: Engine,
    model: object,
    prompt: Any,
    length: int,
    temperature: float,
    seed: int,
    top_k: int | None,
    slide: int,
) -> Array:
    """Continue a sequence of tokens, computed by ``engine``. Collective."""
    if not isinstance(model, GPT):
        raise MissingMemberError(f"{type(model).__name__} has no generate")
    require_alike(
        engine.world,
        "generate: the arguments",
        (np.asarray(prompt).ravel().tolist(), length, temperature, seed, top_k, slide),
    )
    return generate(
        lambda tokens, cache: engine.predict_next(tokens, cache)[0],
        prompt,
        length,
        vocabulary_size=model.vocabulary_size,
        context_length=model.context_length,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        slide=slide,
    )


def require_alike(world: CommunicationBackend, what: str, given: object) -> None:
    """Refuse a call if ``what``, in words, differs between the ranks. Collective."""
    # A checksum, because arguments such as a prompt may be long.
    marks = world.all_gather(np.array([zlib.crc32(repr(given).encode())]))
    if (marks != marks[0]).any():
        raise ValueError(
            f"{what} differ between ranks (checksums {marks.tolist()}); every rank must pass the "
            "same"
        )


def agreed_vector(engine: Engine, vector: Array, name: str, rate: float = 0.0) -> Array:
    """Return ``vector`` in host memory and the model's dtype, if ranks agree. Collective.

    Parameters
    ----------
    engine : Engine
        Engine of the model.
    vector : Array
        Shape (parameter_count,).
    name : str
        Name of the method that the user called.
    rate : float
        A learning rate that must be equal, too.

    Raises
    ------
    TypeError
        For anything but an array of real numbers, before anything is communicated.
    ValueError
        For another length, before anything is communicated; on every rank for vectors, or rates,
        that differ.
    """
    length, dtype = engine.placement.length, engine.layout.dtype
    array_namespace(vector)
    if vector.shape != (length,):
        raise ValueError(f"{name}: expected a vector of shape ({length},), got {vector.shape}")
    if not np.can_cast(vector.dtype, dtype, "same_kind"):
        raise TypeError(f"{name}: expected real numbers, got a vector of {vector.dtype}")
    # Checksums are of bytes, so that layout and dtype must be the same on all ranks before.
    vector = np.ascontiguousarray(to_host(vector), dtype=dtype)
    own = np.array([[zlib.crc32(vector.data), rate]])  # float64 holds both
    marks, rates = engine.world.all_gather(own, subject=engine.layout.subject).T
    if (rates != rates[0]).any():
        raise ValueError(f"{name}: the learning rates differ between ranks: {rates.tolist()}")
    if (marks != marks[0]).any():
        raise ValueError(
            f"{name}: the vectors differ between ranks (checksums {marks.astype(int).tolist()}); "
            "every rank must pass the same values"
        )
    return vector
