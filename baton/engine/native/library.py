"""The kernels' C interface (``src/abi.h``) in ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

from baton.engine.native.build import NativeUnavailable


class Weight(IntEnum):
    """Which weight a load call brings."""

    EMBED = 0
    HEAD = 1
    FINAL_NORM = 2
    ROPE_FREQUENCIES = 3
    ATTN_NORM = 4
    MLP_NORM = 5
    Q_NORM = 6
    K_NORM = 7
    QKV = 8
    QKV_BIAS = 9
    OUTPUT = 10
    OUTPUT_BIAS = 11
    GATE_UP = 12
    GATE_UP_BIAS = 13
    DOWN = 14
    DOWN_BIAS = 15
    ROUTER = 16
    EXPERT_GATE_UP = 17
    EXPERT_DOWN = 18


class FaultCode(IntEnum):
    """What is wrong with a step."""

    NONE = 0
    TOKEN_OUT_OF_RANGE = 1
    POSITION_OUT_OF_RANGE = 2
    POSITION_NOT_CONSECUTIVE = 3
    SEQ_STARTS_UNORDERED = 4
    TABLE_TOO_NARROW = 5
    BLOCK_OUT_OF_RANGE = 6
    LOGIT_ROW_OUT_OF_RANGE = 7
    LOGIT_ROWS_UNORDERED = 8
    OUT_OF_MEMORY = 9
    WINDOW_OUT_OF_RANGE = 10


class Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("element", "threads", "vocab", "hidden", "ffn", "layers", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "window", "tied_head", "experts", "top_k", "expert_ffn")),
        ("renormalize", c_int32),
        ("norm_eps", c_float),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "seq_starts", "block_tables", "logit_rows")),
        ("windows", c_void_p),
        *((name, c_int32) for name in ("tokens", "sequences", "table_width", "logit_row_count", "blocks")),
        *((name, c_int32) for name in ("block_size", "context_length")),
        ("pool", c_void_p),
        ("logits", c_void_p),
    )


class Fault(ctypes.Structure):
    _fields_ = (("code", c_int32), ("index", c_int32), ("value", c_int32), ("limit", c_int32))


def open_library(path: Path) -> ctypes.CDLL:
    """Load the kernels and declare their functions. Raises NativeUnavailable when the file is not a library."""
    library = _loaded(path)
    library.baton_native_open.argtypes = (ctypes.POINTER(Shape),)
    library.baton_native_open.restype = c_void_p
    library.baton_native_load.argtypes = (c_void_p, c_int, c_int, c_int, c_void_p)
    library.baton_native_load.restype = c_int
    library.baton_native_fill.argtypes = (c_void_p, ctypes.POINTER(Step))
    library.baton_native_fill.restype = Fault
    library.baton_native_finish.argtypes = (c_void_p,)
    library.baton_native_finish.restype = None
    library.baton_native_close.argtypes = (c_void_p,)
    library.baton_native_close.restype = None
    library.baton_native_lanes.argtypes = ()
    library.baton_native_lanes.restype = c_char_p
    return library


def open_kv_copy(path: Path) -> ctypes.CDLL:
    """As ``open_library``, for the copying of KV blocks."""
    library = _loaded(path)
    library.baton_kv_move.argtypes = (*(c_void_p,) * 4, c_size_t, c_size_t, c_uint64, c_void_p)
    library.baton_kv_move.restype = c_int
    return library


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"native kernels: cannot load {path}: {error}") from error
