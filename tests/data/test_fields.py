"""Arrays come back from every kind of file as they were."""

import sys

import numpy as np
import pytest
from scipy.io import savemat

from subspan.data import read_fields
from subspan.errors import DataError, MissingExtra

COEFFICIENT = np.arange(24.0).reshape(2, 3, 4)


def test_numpy_and_matlab_files_and_folders_of_them(tmp_path) -> None:
    np.save(tmp_path / "u.npy", COEFFICIENT)
    np.savez(tmp_path / "more.npz", a=COEFFICIENT, b=COEFFICIENT[0])
    savemat(tmp_path / "darcy.mat", {"coeff": COEFFICIENT, "note": "text"})
    (tmp_path / "readme.txt").write_text("not data")
    np.testing.assert_array_equal(read_fields(tmp_path / "u.npy")["u"], COEFFICIENT)
    mat = read_fields(tmp_path / "darcy.mat")
    assert list(mat) == ["coeff"]
    np.testing.assert_array_equal(mat["coeff"], COEFFICIENT)
    assert set(read_fields(tmp_path)) == {"u/u", "more/a", "more/b", "darcy/coeff"}


def test_hdf5_and_matlab_7_3(tmp_path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    with h5py.File(tmp_path / "ns.h5", "w") as file:
        file["fluid/w"] = COEFFICIENT
    np.testing.assert_array_equal(read_fields(tmp_path / "ns.h5")["fluid/w"], COEFFICIENT)
    with h5py.File(tmp_path / "v73.mat", "w", userblock_size=512) as file:
        file["w"] = COEFFICIENT.T  # as MATLAB lays it out, behind a header of its own
    with (tmp_path / "v73.mat").open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    np.testing.assert_array_equal(read_fields(tmp_path / "v73.mat")["w"], COEFFICIENT)


def test_what_cannot_be_read_is_said(tmp_path, monkeypatch) -> None:
    (tmp_path / "table.csv").write_text("1,2")
    for wrong in ("table.csv", "none.npy"):
        with pytest.raises(DataError, match="neither a folder nor a file"):
            read_fields(tmp_path / wrong)
    with pytest.raises(DataError, match="holds no arrays"):
        read_fields(tmp_path)
    (tmp_path / "broken.npy").write_text("no array")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object))
    for wrong in ("broken.npy", "objects.npy"):
        with pytest.raises(DataError, match="cannot be read"):
            read_fields(tmp_path / wrong)
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "w.h5").write_bytes(b"\x89HDF")
    with pytest.raises(MissingExtra, match="pip install h5py"):
        read_fields(tmp_path / "w.h5")
