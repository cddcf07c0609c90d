"""What can be done with a model: all families that load, and where one of them stops."""

from pathlib import Path
from typing import NamedTuple

from oa_utils.masked import MaskedModel
from oa_utils.models import Model, sketch


class Supports(NamedTuple):
    """Whether each experiment has an exact form on a model, and why one has not."""

    components: bool = False  # gaps of heads, MLPs, neurons
    edges: bool = False  # circuits of edges between heads and MLPs
    vertices: bool = False  # circuits of heads and MLPs
    layers: bool = False  # circuits of whole attention layers and MLPs
    tracing: bool = False
    lenses: bool = False
    why: str = ""


def supports(model: Model | str | Path) -> Supports:
    """What can be done with a loaded model, or with one by its name, id or folder: then a random
    model of its configuration is asked, so that no weights are loaded (the model itself is compared
    when it is; `smollm2-135m` is downloaded whole, where it is not there yet)."""
    if not isinstance(model, Model):
        try:
            model = sketch(model)
        except ValueError as error:
            return Supports(why=str(error))
    walked = Supports(components=True, layers=True, tracing=True, lenses=True)
    try:
        MaskedModel(model)
    except ValueError as error:
        return walked._replace(why=str(error))
    return walked._replace(edges=True, vertices=True)
