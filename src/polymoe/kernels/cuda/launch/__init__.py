"""Launches of the compiled kernels. They are prepared once per configuration of a layer; calls set only addresses.

:mod:`.call` is the base class. Other modules contain its variants: :mod:`.mma` (few rows, ``mma.sync``),
:mod:`.tiled` (rows of x or h in permuted tiles), :mod:`.e4m3_rows` (rows of x
quantized by token, or by the GEMMs).
"""

from __future__ import annotations

from polymoe.kernels.cuda.launch.call import Call, add_rows
from polymoe.kernels.cuda.launch.e4m3_rows import (
    ChannelMmaCall,
    ChannelRowsCall,
    ChannelTilesCall,
    E4M3MmaCall,
    E4M3RowsCall,
    E4M3TilesCall,
    RowTilesCall,
)
from polymoe.kernels.cuda.launch.layer import Activation, Layer, Matrix
from polymoe.kernels.cuda.launch.mma import MmaCall
from polymoe.kernels.cuda.launch.tiled import GatheredCall, QuantizedTilesCall, TiledCall, WgmmaCall

__all__ = [
    "Activation", "Call", "ChannelMmaCall", "ChannelRowsCall", "ChannelTilesCall", "E4M3MmaCall", "E4M3RowsCall",
    "E4M3TilesCall", "GatheredCall", "Layer", "Matrix", "MmaCall", "QuantizedTilesCall", "RowTilesCall",
    "TiledCall", "WgmmaCall", "add_rows",
]  # fmt: skip
