"""What of a mesh does nothing for the model on it."""

from __future__ import annotations

from collections.abc import Iterator

from mpishard.contracts import ILayeredModel
from mpishard.models.programs.mesh_program import MeshChoices
from mpishard.tensor import LayerDecision, SplitKind, partition_chain

__all__ = ["idle_axes"]


def idle_axes(model: ILayeredModel, choices: MeshChoices) -> list[str]:
    """In words, axes of which some ranks wait or repeat what others do. Communicates nothing.

    Parameters
    ----------
    model : ILayeredModel
        Whose layers are dealt.
    choices : MeshChoices
        How.

    Returns
    -------
    list of str
        A clause for each; none where all is well.
    """
    mesh = choices.mesh
    found = []
    if mesh.pipeline_size > 1 and choices.micro_batch_count == 1:
        bubble = choices.schedule.estimate_bubble_fraction(mesh.pipeline_size, 1)
        found.append(
            f"with micro_batch_count 1 ranks of the pipeline compute one after the other: bubble "
            f"{100 * bubble:.0f} %; give micro_batch_count, about {4 * mesh.pipeline_size}"
        )
    count, layers = len(choices.stages), len(model.layers)
    empty = sum(first == stop for first, stop in choices.stages)
    if empty:
        uncut = "" if layers < count else ", and cannot be cut behind each of them"
        found.append(
            f"{empty} of {count} stages {'has' if empty == 1 else 'have'} no layers: the model "
            f"has {layers}{uncut}"
        )
    if mesh.tensor_size > 1:
        reasons = []
        for decision in _decisions(model, choices):
            if decision.kind is not SplitKind.WHOLE:
                break
            reasons.append(str(decision))
        else:
            more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            found.append(
                f"every layer is whole on every rank of the tensor axis: "
                f"{'; '.join(reasons[:3])}{more}"
            )
    return found


def _decisions(model: ILayeredModel, choices: MeshChoices) -> Iterator[LayerDecision]:
    """What the tensor axis makes of each leaf layer of the model, stage by stage."""
    names = [info.name for info in model.get_all_layer_info()]
    model_layers = dict(zip(names, model.layers, strict=True))
    for first, stop in choices.stages:
        if first < stop:
            yield from partition_chain(
                {name: model_layers[name] for name in names[first:stop]}, choices.mesh.tensor,
                model_layers=model_layers, sequence_parallel=choices.sequence_parallel,
                split_output=stop == len(names),
            ).decisions  # fmt: skip
