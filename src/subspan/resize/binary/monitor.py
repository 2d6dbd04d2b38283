"""What the gradients of binary layers look like while they train."""

import warnings

import torch
from torch import Tensor, nn

from subspan.resize.binary.joint import Observed
from subspan.resize.binary.layers import binary_layers

_FIGURES = ("scale", "straight", "twin", "cosine", "saturated")


class SurgeMonitor:
    """Records, at every backward pass of every binary layer, lambda, the two norms, their angle and saturation.

    ``read()`` gives the means since the last reading, per layer: ``scale`` (lambda), ``straight`` (||g_b||), ``twin``
    (||g_a||), ``cosine`` of the two, ``saturated`` (share of inputs outside [-1, 1]) and ``flipped`` (share of weights
    whose sign changed since the last reading). A layer all of whose inputs are saturated is warned about once: with
    ``reference="clipped"`` its lambda is zero. ``close()`` stops the recording.

    Args:
        model: with binary layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = binary_layers(model)
        self.sums: dict[str, Tensor] = {}
        self.signs = {name: layer.latent().detach() >= 0 for name, layer in self.layers.items()}
        self._warned: set[str] = set()
        for name, layer in self.layers.items():
            layer.record = lambda seen, name=name: self._record(name, seen)

    def _record(self, name: str, seen: Observed) -> None:
        b, a = seen.straight.float(), seen.twin.float()
        straight, twin = b.norm(), a.norm()
        # Where a gradient is zero there is no angle; zero stands for it. The product of the norms might underflow.
        tiny = torch.finfo(torch.float32).tiny
        cosine = (b * (a / twin.clamp_min(tiny))).sum() / straight.clamp_min(tiny)
        figures = torch.stack(
            [
                torch.ones_like(cosine),
                seen.scale.float().mean().to(cosine),
                straight,
                twin,
                cosine,
                seen.saturated.float().mean(),
            ]
        )
        self.sums[name] = self.sums.get(name, torch.zeros_like(figures)) + figures

    def read(self) -> dict[str, dict[str, float]]:
        """The means since the last reading (see the class); layers without a backward pass are left out."""
        out = {}
        for name, sums in self.sums.items():
            n, *rest = sums.tolist()
            now = self.layers[name].latent().detach() >= 0
            figures = dict(zip(_FIGURES, (x / n for x in rest), strict=True))
            out[name] = figures | {"flipped": (now != self.signs[name]).float().mean().item()}
            self.signs[name] = now
            if figures["saturated"] == 1.0 and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"every input of {name} is outside [-1, 1]: its straight-through gradient is zero, and with "
                    'reference="clipped" so is the compensation; use reference="unclipped"',
                    stacklevel=2,
                )
        self.sums = {}
        return out

    def close(self) -> None:
        """Stop recording."""
        for layer in self.layers.values():
            layer.record = None
