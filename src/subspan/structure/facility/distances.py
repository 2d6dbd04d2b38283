"""Distances of the clients to all facilities, kept or computed anew."""

import numpy as np
from jaxtyping import Float, Float64, Integer

# Below this share of |x|^2 + |z|^2 the expanded square has lost three digits and the difference is taken instead.
_CANCELLED = 1e-3


class Distances:
    """Euclidean distances between client slots and facilities.

    Kept as an array, one row per slot, until :meth:`compact` forgets it; then every row or column asked for is computed
    from the positions, which are always kept.
    """

    def __init__(self, places: Float64[np.ndarray, "m d"], dtype: np.dtype) -> None:
        # Distances do not change with the origin, but the expanded square is most exact around it.
        self.origin = places.mean(axis=0)
        self.places = places - self.origin
        self.squares = np.einsum("md,md->m", self.places, self.places)
        self.dtype = dtype
        self.positions = np.zeros((0, places.shape[1]))
        self.kept: Float[np.ndarray, "cap m"] | None = np.zeros((0, len(places)), dtype)

    def between(self, x: Float64[np.ndarray, "n d"]) -> Float[np.ndarray, "n m"]:
        """Distances of centred points to all facilities, rounded to the working precision."""
        total = np.einsum("nd,nd->n", x, x)[:, None] + self.squares
        squared = total - 2.0 * (x @ self.places.T)
        row, column = np.nonzero(squared < _CANCELLED * total)
        if len(row):
            difference = x[row] - self.places[column]
            squared[row, column] = np.einsum("nd,nd->n", difference, difference)
        return np.sqrt(squared, out=squared).astype(self.dtype, copy=False)

    def grow(self, capacity: int) -> None:
        self.positions = padded(self.positions, capacity)
        if self.kept is not None:
            self.kept = padded(self.kept, capacity)

    def put(self, slots: Integer[np.ndarray, "n"], x: Float64[np.ndarray, "n d"]) -> Float[np.ndarray, "n m"]:
        """Store new clients and return their distance rows."""
        x = x - self.origin
        self.positions[slots] = x
        rows = self.between(x)
        if self.kept is not None:
            self.kept[slots] = rows
        return rows

    def rows(self, slots: Integer[np.ndarray, "n"]) -> Float[np.ndarray, "n m"]:
        return self.kept[slots] if self.kept is not None else self.between(self.positions[slots])

    def block(self, slots: Integer[np.ndarray, "n"], facilities: Integer[np.ndarray, "f"]) -> Float[np.ndarray, "n f"]:
        """Distances of some clients to some facilities."""
        if self.kept is None or len(facilities) == len(self.places):
            return self.rows(slots)[:, facilities]
        return self.kept[slots[:, None], facilities]

    def column(self, facility: int) -> Float[np.ndarray, "cap"]:
        """Distances of all slots to one facility."""
        if self.kept is not None:
            return self.kept[:, facility]
        difference = self.positions - self.places[facility]
        return np.sqrt(np.einsum("nd,nd->n", difference, difference)).astype(self.dtype, copy=False)

    def compact(self) -> None:
        """Forget the distances; positions in the working precision remain."""
        self.kept = None


def padded(array: np.ndarray, length: int) -> np.ndarray:
    """The array with zeros appended to its first axis, up to ``length``."""
    longer = np.zeros((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
