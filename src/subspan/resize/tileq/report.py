"""What a compression did: bits, errors, placements and experts without tokens, by layer and projection."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from subspan.files import write_json
from subspan.resize.tileq.fit import Fit


@dataclass
class LayerReport:
    """One layer's experts: how each projection came out, and which experts no token chose (None: no calibration)."""

    name: str
    fits: list[Fit]
    unrouted: list[int] | None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "LayerReport":
        fits = [Fit(**{**fit, "shape": tuple(fit["shape"])}) for fit in values["fits"]]
        return cls(values["name"], fits, values["unrouted"])


@dataclass
class TileQReport:
    """All layers, in order."""

    layers: list[LayerReport] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(fit.weights for layer in self.layers for fit in layer.fits)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored for the experts."""
        return sum(fit.nbytes for layer in self.layers for fit in layer.fits)

    @property
    def bits_per_weight(self) -> float:
        """8 times the bytes that are stored, over the number of weights."""
        return 8 * self.nbytes / self.weights

    @property
    def bits(self) -> dict[str, float]:
        """Bits per weight by what they are for; they add up to ``bits_per_weight``."""
        terms: dict[str, float] = {}
        for layer in self.layers:
            for fit in layer.fits:
                for term, bits in fit.bits.items():
                    terms[term] = terms.get(term, 0.0) + bits * fit.weights / self.weights
        return terms

    @property
    def unrouted(self) -> dict[str, list[int]]:
        """Experts that no calibration token chose, by layer (those layers that have any)."""
        return {layer.name: layer.unrouted for layer in self.layers if layer.unrouted}

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer and projection."""
        return [
            {
                "layer": layer.name,
                "projection": fit.projection,
                "bits_per_weight": 8 * fit.nbytes / fit.weights,
                "output_error": fit.output_error,
                "placement": fit.placement,
                "weighted_error": fit.placement_errors.get(fit.placement or ""),
                "unrouted": len(layer.unrouted or []),
                "dropped": len(fit.dropped),
            }
            for layer in self.layers
            for fit in layer.fits
        ]

    def to_dataframe(self) -> Any:
        """``rows`` as a pandas table."""
        import pandas

        return pandas.DataFrame(self.rows())

    def to_json(self) -> dict[str, Any]:
        summary = {"bits_per_weight": self.bits_per_weight, "bits": self.bits, "bytes": self.nbytes}
        return {**summary, "weights": self.weights, "layers": [asdict(layer) for layer in self.layers]}

    def save(self, path: str | Path) -> None:
        write_json(path, self.to_json())

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TileQReport":
        return cls([LayerReport.from_json(layer) for layer in values["layers"]])
