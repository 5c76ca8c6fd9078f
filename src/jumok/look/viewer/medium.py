"""What weights are shown on, beside the map that every layer has: an image, speech, a recording, a document.

To add a medium, extend :class:`Medium`, add a field of this type to ``ViewerData`` and its name to ``MEDIA`` there,
and write a view with this name as its ``medium`` (``static/view.js``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerLayer


class Medium(ABC):
    """An image, speech, a recording or a document: its positions are the queries or the keys of a layer."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return what the view needs, as JSON."""

    def matches(self, layer: ViewerLayer) -> bool:
        """Return whether the queries or the keys of a layer are its positions."""
        return True

    def get_positions(self, layer: ViewerLayer) -> Hashable:
        """Return what is equal for layers with the same positions; None if those of all layers are the same."""
        return None

    def add_layers(self, models: Mapping[str, str]) -> Medium:
        """Return the medium with further layers, by name, each with the positions of another layer.

        A medium whose positions are the same in all layers stays as it is.
        """
        return self

    def describe_mismatch(self, layers: Sequence[ViewerLayer]) -> str:
        """Return why it matches none of these layers."""
        return f"{type(self).__name__} given with layers that it does not match: {', '.join(x.name for x in layers)}"
