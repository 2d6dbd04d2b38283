"""Arrays from the files in which data sets of simulations are given away: .npy, .npz, .mat and .h5."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from subspan.errors import DataError, MissingExtra

_KINDS = (".npy", ".npz", ".mat", ".h5", ".hdf5")


def read_fields(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The numeric arrays of a file by name (that of the file for .npy), or ``file/name`` for all files of a folder.

    MATLAB stores the first axis fastest; its arrays come with their axes as MATLAB shows them, from every version.
    Needs h5py for .h5 and for .mat files of version 7.3.

    Raises:
        DataError: there is no such file or folder, or it holds no arrays.
        MissingExtra: h5py is needed and not installed.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _KINDS)
        found = {f"{file.stem}/{name}": x for file in files for name, x in _read(file).items()}
    elif path.is_file() and path.suffix.lower() in _KINDS:
        found = _read(path)
    else:
        raise DataError(f"{path} is neither a folder nor a file of kind {', '.join(_KINDS)}")
    if not found:
        raise DataError(f"{path} holds no arrays of numbers in {', '.join(_KINDS)}")
    return found


def _read(path: Path) -> dict[str, np.ndarray]:
    kind = path.suffix.lower()
    try:
        if kind == ".npy":
            return {path.stem: np.load(path, allow_pickle=False)}
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        if kind == ".mat":
            from scipy.io import loadmat

            try:
                return {k: x for k, x in loadmat(path).items() if isinstance(x, np.ndarray) and x.dtype.kind in "biufc"}
            except NotImplementedError:  # version 7.3, which is HDF5
                return {name: x.T for name, x in _hdf5(path).items()}
        return _hdf5(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error


def _hdf5(path: Path) -> dict[str, np.ndarray]:
    try:
        import h5py  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra(f"reading {path.name} needs h5py: pip install h5py") from error
    found = {}

    def keep(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind in "biufc":
            found[name] = item[()]

    with h5py.File(path) as file:
        file.visititems(keep)
    return found
