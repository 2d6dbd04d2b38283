"""Codes of 1 to 8 bits as bytes: eight codes of w bits are w bytes."""

import torch
from jaxtyping import Integer, UInt8
from torch import Tensor


def packed_length(count: int, width: int) -> int:
    """Bytes of a row of this many codes."""
    return -(-count // 8) * width


def pack(codes: Integer[Tensor, "*b n"], width: int) -> UInt8[Tensor, "*b c"]:
    """Codes below 2^width as bytes, the first in the lowest bits; a row is filled up to a multiple of eight codes."""
    groups = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, device=codes.device)
    word = (groups << (width * places)).sum(-1, keepdim=True)
    return ((word >> (8 * places[:width])) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: UInt8[Tensor, "*b c"], width: int, count: int) -> UInt8[Tensor, "*b n"]:
    """The first ``count`` codes of each row."""
    if width == 8:
        return packed[..., :count]
    # 24 bits fit into the cheaper integer
    groups = packed.unflatten(-1, (-1, width)).to(torch.int32 if width <= 3 else torch.int64)
    places = torch.arange(8, device=packed.device, dtype=groups.dtype)
    word = (groups << (8 * places[:width])).sum(-1, keepdim=True, dtype=groups.dtype)
    return ((word >> (width * places)) & (2**width - 1)).to(torch.uint8).flatten(-2)[..., :count]
