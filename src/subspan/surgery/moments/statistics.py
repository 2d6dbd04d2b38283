"""What calibration learns about a model's layers, and its file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from subspan.errors import DataError
from subspan.files import replacing
from subspan.linalg import Covariance, DenseCovariance, KroneckerCovariance, LowRank, SpikedCovariance

Labels = Literal["empirical", "mc", "exact"]


@dataclass(frozen=True)
class Corrected:
    """Eigenvalue-corrected energies (after EKFAC, George et al. 2018): energy[j, k] = mean (u_jᵀ g)² (v_kᵀ x)².

    ``U`` (m x q) and ``V`` (n x q') hold the leading eigenvectors of S_Y and S_X. ``kfac_error`` is
    |energy - l^Y l^Xᵀ|_F / |energy|_F: 0 when inputs and gradients are independent there.
    """

    U: Tensor
    V: Tensor
    energy: Tensor
    kfac_error: float


@dataclass(frozen=True)
class LayerMoments:
    """What calibration learnt about one m x n layer from ``positions`` valid positions."""

    inputs: Covariance
    outputs: Covariance
    gradient: Tensor | LowRank | None
    positions: int
    corrected: Corrected | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.outputs.dim, self.inputs.dim

    @property
    def dtype(self) -> torch.dtype:
        return self.outputs.dtype

    @property
    def fisher(self) -> KroneckerCovariance:
        return KroneckerCovariance(self.inputs, self.outputs)


@dataclass(frozen=True)
class FisherStats:
    """Moments of each target layer, by name, with the fingerprint of the base model they belong to.

    ``public`` says whether the calibration data may be shown to anyone: adapters started from private data must not be
    trained under a privacy guarantee, because calibration is not differentially private.
    """

    layers: Mapping[str, LayerMoments]
    fingerprint: str
    fisher: Labels
    examples: int
    public: bool = False
    parameters: Sequence[str] = ()

    def save(self, path: str | Path) -> None:
        """Write tensors and names to one safetensors file; a covariance that layers share is written once."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        slots: dict[int, str] = {}

        def covariance(c: Covariance) -> str:
            if id(c) not in slots:
                slots[id(c)] = slot = f"covariance.{len(slots)}"
                if isinstance(c, DenseCovariance):
                    tensors[f"{slot}.matrix"] = c.matrix.contiguous()
                else:
                    parts = {"values": c.values, "vectors": c.vectors.contiguous(), "floor": c.floor.reshape(1)}
                    tensors.update({f"{slot}.{k}": v.clone() for k, v in parts.items()})
            return slots[id(c)]

        layers = {}
        for name, layer in self.layers.items():
            layers[name] = {"x": covariance(layer.inputs), "y": covariance(layer.outputs), "T": layer.positions}
            if isinstance(layer.gradient, LowRank):
                tensors[f"{name}|gradient.A"] = layer.gradient.A.contiguous()
                tensors[f"{name}|gradient.B"] = layer.gradient.B.contiguous()
            elif layer.gradient is not None:
                tensors[f"{name}|gradient"] = layer.gradient.contiguous()
            if layer.corrected is not None:
                layers[name]["kfac_error"] = layer.corrected.kfac_error
                for part in ("U", "V", "energy"):
                    tensors[f"{name}|corrected.{part}"] = getattr(layer.corrected, part).clone().contiguous()
        meta = {"layers": layers, "fingerprint": self.fingerprint, "fisher": self.fisher, "examples": self.examples}
        meta |= {"public": self.public, "parameters": list(self.parameters)}
        with replacing(path) as part_file:
            save_file(tensors, part_file, metadata={"subspan": json.dumps(meta)})

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> "FisherStats":
        """Read what ``save`` wrote. Raises ``DataError`` for another kind of file."""
        from safetensors import safe_open

        with safe_open(path, "pt", device=device) as file:
            if "subspan" not in (file.metadata() or {}):
                raise DataError(f"{path} holds no Fisher statistics; collect_fisher(...).save writes them")
            meta = json.loads(file.metadata()["subspan"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        covariances: dict[str, Covariance] = {}
        for slot in {key.rpartition(".")[0] for key in tensors if key.startswith("covariance.")}:
            if f"{slot}.matrix" in tensors:
                covariances[slot] = DenseCovariance(tensors[f"{slot}.matrix"])
            else:
                values, vectors, floor = (tensors[f"{slot}.{k}"] for k in ("values", "vectors", "floor"))
                covariances[slot] = SpikedCovariance(values, vectors, floor[0])
        layers = {}
        for name, entry in meta["layers"].items():
            gradient: Tensor | LowRank | None = tensors.get(f"{name}|gradient")
            if f"{name}|gradient.A" in tensors:
                gradient = LowRank(tensors[f"{name}|gradient.A"], tensors[f"{name}|gradient.B"])
            corrected = None
            if "kfac_error" in entry:
                u, v, energy = (tensors[f"{name}|corrected.{part}"] for part in ("U", "V", "energy"))
                corrected = Corrected(u, v, energy, entry["kfac_error"])
            x, y = covariances[entry["x"]], covariances[entry["y"]]
            layers[name] = LayerMoments(x, y, gradient, entry["T"], corrected)
        rest = {key: meta[key] for key in ("fingerprint", "fisher", "examples", "public", "parameters")}
        return cls(layers, **rest)
